//! Files that are sent in parts, and what happens when the link breaks between them.

use std::sync::Arc;

use covey_bucket::{PART_BYTES, WHOLE_BYTES_MAX};
use covey_home::backend::{Backend, Key};

use super::proxy::{Fault, Proxy, Request, Schedule};
use super::servers::{self, Server};

fn noise(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut value = 88_172_645_463_325_252_u64;
    for chunk in bytes.chunks_mut(8) {
        value ^= value << 13;
        value ^= value >> 7;
        value ^= value << 17;
        chunk.copy_from_slice(&value.to_le_bytes()[..chunk.len()]);
    }
    bytes
}

/// Writes a file through `backend` and reads it back through a clean way.
fn write_and_compare(server: &Server, proxy: &Proxy, bytes: &[u8], break_things: impl FnOnce()) {
    let place = servers::fresh_place();
    let backend = server.open_calmly(&proxy.url(), &place).unwrap().backend("org").unwrap();
    break_things();
    let key = Key::new(&["packs", "large"]).unwrap();
    let mut file = backend.create().unwrap();
    for piece in bytes.chunks(3_000_017) {
        file.append(piece).unwrap();
    }
    file.publish(&key).unwrap();
    let clean: Arc<dyn Backend> = server.open(&server.url(), &place).unwrap().backend("org").unwrap();
    assert_eq!(clean.file_len(&key).unwrap(), bytes.len() as u64, "{}", server.name);
    for (number, piece) in bytes.chunks(PART_BYTES).enumerate() {
        let found = clean.read(&key, (number * PART_BYTES) as u64, PART_BYTES).unwrap();
        assert!(found == piece, "{}: part {number} differs", server.name);
    }
}

fn is_part(request: &Request) -> bool {
    request.method == "PUT" && request.target.contains("partNumber=")
}

fn parts_sent(proxy: &Proxy) -> usize {
    proxy.log().iter().filter(|line| line.starts_with("PUT ") && line.contains("partNumber=")).count()
}

#[test]
fn a_pack_is_one_request_and_what_is_longer_is_sent_in_parts() {
    for server in servers::all() {
        let proxy = Proxy::before(&server);
        let before = proxy.requests();
        write_and_compare(&server, &proxy, &noise(2 * PART_BYTES + 5), || {});
        assert_eq!(parts_sent(&proxy), 0);
        assert!(proxy.requests() - before <= 7, "{:?}", proxy.log());
        write_and_compare(&server, &proxy, &noise(WHOLE_BYTES_MAX + 5), || {});
        assert_eq!(parts_sent(&proxy), WHOLE_BYTES_MAX / PART_BYTES + 1, "{}", server.name);
    }
}

#[test]
fn a_reset_in_the_middle_of_a_multipart_costs_one_part() {
    for server in servers::all() {
        for fault in [Fault::Reset, Fault::LostAnswer, Fault::FlippedUpload, Fault::Error500AfterAll] {
            let proxy = Proxy::before(&server);
            write_and_compare(&server, &proxy, &noise(WHOLE_BYTES_MAX + 5), || {
                proxy.break_things(Schedule::Only(4, fault), is_part);
            });
            assert_eq!(
                (proxy.faults(), parts_sent(&proxy)),
                (1, WHOLE_BYTES_MAX / PART_BYTES + 2),
                "{}, {fault:?}: {:#?}",
                server.name,
                proxy.log()
            );
        }
    }
}

#[test]
fn a_link_that_breaks_in_a_whole_put_goes_on_in_parts() {
    for server in servers::all() {
        let proxy = Proxy::before(&server);
        write_and_compare(&server, &proxy, &noise(3 * PART_BYTES), || {
            proxy.break_things(Schedule::Only(1, Fault::Reset), |request| request.method == "PUT");
        });
        assert_eq!((proxy.faults(), parts_sent(&proxy)), (1, 3), "{}: {:?}", server.name, proxy.log());
    }
}

#[test]
fn a_completion_whose_answer_is_lost_is_found_to_be_done() {
    for server in servers::all() {
        for fault in [Fault::LostAnswer, Fault::Error500AfterAll, Fault::Error500, Fault::Reset] {
            let proxy = Proxy::before(&server);
            write_and_compare(&server, &proxy, &noise(WHOLE_BYTES_MAX + 5), || {
                proxy.break_things(Schedule::Only(1, fault), |request| {
                    request.method == "POST" && request.target.contains("uploadId=")
                });
            });
            assert_eq!(proxy.faults(), 1, "{}: {fault:?}", server.name);
        }
    }
}
