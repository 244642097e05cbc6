//! The durable agent loop, pure: journal and event in, effects out.
