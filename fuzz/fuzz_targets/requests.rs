//! Arbitrary JSON as a request in each wire: nothing panics, and what is understood can be sent on over every wire. Run with
//! `cargo +nightly fuzz run requests`.

#![no_main]

use covey_models::Wire;
use covey_models::dialect::json;
use covey_models::failure::Refusal;
use covey_models::wire::Question;
use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value};

const WIRES: [Wire; 3] = [Wire::Messages, Wire::Chat, Wire::Responses];

fuzz_target!(|bytes: &[u8]| {
    drop(Refusal::read(400, bytes));
    let Ok(request) = serde_json::from_slice::<Map<String, Value>>(bytes) else { return };
    for from in WIRES {
        let Ok(body) = from.incoming(&request) else { continue };
        let asked = json::request(&body);
        for (body, schema) in [(&body, None), (&asked.body, asked.schema.as_ref())] {
            for to in WIRES {
                let question = Question { body, schema, output_limit_field: None };
                assert_eq!(to.request(question), to.request(question));
            }
        }
    }
});
