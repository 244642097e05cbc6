//! A proxy of ours between the client and a real server, which counts requests and does to some of them what
//! networks and servers do: answers 500 or 503, hangs, cuts, flips a bit, says 404, resets, or loses an answer.
//!
//! What stays true: a request without a fault is passed on byte for byte, so signatures stay right. One request per
//! connection; nothing is kept between two.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use super::servers::Server;

const HEAD_BYTES_MAX: usize = 64 * 1024;

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// The server says 500 and has done nothing.
    Error500,
    /// The server says 503 `SlowDown` and has done nothing.
    SlowDown,
    /// The server says 500 and has done it all the same.
    Error500AfterAll,
    /// No answer ever comes, and nothing was done.
    Hang,
    /// The answer breaks off in the middle.
    TruncatedAnswer,
    /// One bit of the answer's body is another.
    FlippedAnswer,
    /// One bit of what is uploaded is another when the server gets it.
    FlippedUpload,
    /// What is there is said not to be.
    NotFound,
    /// The connection is reset in the middle of the request.
    Reset,
    /// The server has done it, and the connection is reset before it says so.
    LostAnswer,
}

impl Fault {
    pub(super) const ALL: [Self; 10] = [
        Self::Error500,
        Self::SlowDown,
        Self::Error500AfterAll,
        Self::Hang,
        Self::TruncatedAnswer,
        Self::FlippedAnswer,
        Self::FlippedUpload,
        Self::NotFound,
        Self::Reset,
        Self::LostAnswer,
    ];

    /// Whether the fault means anything for such a request.
    fn concerns(self, request: &Request) -> bool {
        match self {
            Self::NotFound => request.is_object_read(),
            Self::FlippedUpload => request.is_upload(),
            // Flipping a bit in a list may give another valid name; that no transport error is found out by the
            // server's own protocol is what TLS is for.
            Self::FlippedAnswer => request.method == "GET" && !request.is_list(),
            Self::TruncatedAnswer => request.method == "GET",
            _ => true,
        }
    }
}

/// Which requests meet a fault.
#[derive(Debug, Clone, Copy)]
pub(super) enum Schedule {
    /// Every n-th of those that the fault concerns.
    Every(u64, Fault),
    /// This one of them, counted from 1, and no other.
    Only(u64, Fault),
    /// About one in three, with any fault, decided by a number.
    Random(u64),
}

/// A request as far as the schedule looks at it.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) method: String,
    pub(super) target: String,
    head: Vec<u8>,
    body: Vec<u8>,
}

impl Request {
    pub(super) fn is_list(&self) -> bool {
        self.method == "GET" && self.target.contains("list-type=2")
    }

    fn is_object_read(&self) -> bool {
        matches!(self.method.as_str(), "GET" | "HEAD") && !self.is_list()
    }

    fn is_upload(&self) -> bool {
        self.method == "PUT" && !self.body.is_empty()
    }
}

type Filter = fn(&Request) -> bool;
type Rewrite = fn(&mut Vec<u8>);

#[derive(Debug, Default)]
struct Rules {
    schedule: Option<Schedule>,
    filter: Option<Filter>,
    rewrite_request: Option<Rewrite>,
    rewrite_answer: Option<Rewrite>,
}

#[derive(Debug, Default)]
struct Shared {
    rules: Mutex<Rules>,
    requests: AtomicU64,
    concerned: AtomicU64,
    faults: AtomicU64,
    stopping: AtomicBool,
    log: Mutex<Vec<String>>,
    /// Held while the server works on a request, if it checks conditions and writes in two steps: then it is no
    /// judge of what happens when many write at once, but of all else.
    one_at_a_time: Option<Mutex<()>>,
}

/// A running proxy; stops when dropped.
#[derive(Debug)]
pub(super) struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Proxy {
    pub(super) fn before(server: &Server) -> Self {
        let upstream = server.address;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let one_at_a_time = (!server.is_atomic).then(Mutex::default);
        let shared = Arc::new(Shared { one_at_a_time, ..Shared::default() });
        let ours = Arc::clone(&shared);
        thread::spawn(move || {
            for client in listener.incoming() {
                if ours.stopping.load(Ordering::SeqCst) {
                    return;
                }
                let (Ok(client), shared) = (client, Arc::clone(&ours)) else { continue };
                thread::spawn(move || serve(client, upstream, &shared));
            }
        });
        Self { address, shared }
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// From now on requests meet faults; only those that `filter` takes.
    pub(super) fn break_things(&self, schedule: Schedule, filter: Filter) {
        let mut rules = self.shared.rules.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.concerned.store(0, Ordering::SeqCst);
        rules.schedule = Some(schedule);
        rules.filter = Some(filter);
    }

    pub(super) fn be_good(&self) {
        *self.shared.rules.lock().unwrap_or_else(PoisonError::into_inner) = Rules::default();
    }

    /// Changes the head of every request before the server gets it.
    pub(super) fn rewrite_requests(&self, rewrite: Rewrite) {
        self.shared.rules.lock().unwrap_or_else(PoisonError::into_inner).rewrite_request = Some(rewrite);
    }

    /// Changes the head of every answer before the client gets it.
    pub(super) fn rewrite_answers(&self, rewrite: Rewrite) {
        self.shared.rules.lock().unwrap_or_else(PoisonError::into_inner).rewrite_answer = Some(rewrite);
    }

    /// Requests so far.
    pub(super) fn requests(&self) -> u64 {
        self.shared.requests.load(Ordering::SeqCst)
    }

    /// Faults so far.
    pub(super) fn faults(&self) -> u64 {
        self.shared.faults.load(Ordering::SeqCst)
    }

    /// Every request so far, as `METHOD target`, with the fault that it met.
    pub(super) fn log(&self) -> Vec<String> {
        self.shared.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        // Wakes the listener.
        drop(TcpStream::connect(self.address));
    }
}

impl Shared {
    fn fault_for(&self, request: &Request) -> Option<Fault> {
        let rules = self.rules.lock().unwrap_or_else(PoisonError::into_inner);
        let schedule = rules.schedule.filter(|_| rules.filter.is_none_or(|filter| filter(request)))?;
        drop(rules);
        let met = match schedule {
            Schedule::Every(n, fault) => {
                fault.concerns(request)
                    && (self.concerned.fetch_add(1, Ordering::SeqCst) + 1).is_multiple_of(n)
            }
            Schedule::Only(n, fault) => {
                fault.concerns(request) && self.concerned.fetch_add(1, Ordering::SeqCst) + 1 == n
            }
            Schedule::Random(seed) => {
                let number = mixed(seed, self.concerned.fetch_add(1, Ordering::SeqCst));
                let fault = Fault::ALL[(number >> 8) as usize % Fault::ALL.len()];
                let met = number.is_multiple_of(3) && fault.concerns(request);
                return met.then(|| self.counted(fault));
            }
        };
        let (Schedule::Every(_, fault) | Schedule::Only(_, fault)) = schedule else { return None };
        met.then(|| self.counted(fault))
    }

    fn counted(&self, fault: Fault) -> Fault {
        self.faults.fetch_add(1, Ordering::SeqCst);
        fault
    }
}

/// Scatters two numbers over all bits.
fn mixed(seed: u64, number: u64) -> u64 {
    let mut value = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    for _ in 0..3 {
        value ^= value >> 29;
        value = value.wrapping_mul(0x94d0_49bb_1331_11eb);
    }
    value ^ value >> 32
}

fn serve(mut client: TcpStream, upstream: SocketAddr, shared: &Shared) {
    let Some(mut request) = read_head(&mut client) else { return };
    shared.requests.fetch_add(1, Ordering::SeqCst);
    let length = content_length(&request.head);
    // What is uploaded decides nothing before it is read, except that half of it is left when the fault is a reset.
    request.body = vec![0; length];
    let fault = shared.fault_for(&request);
    let line = format!("{} {}", request.method, request.target);
    let line = fault.map_or(line.clone(), |fault| format!("{line} {fault:?}"));
    shared.log.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    if fault == Some(Fault::Reset) {
        // Closing with unread bytes in the kernel makes it a reset.
        let mut half = vec![0; length / 2];
        drop(client.read_exact(&mut half));
        return;
    }
    if client.read_exact(&mut request.body).is_err() {
        return;
    }
    match fault {
        Some(Fault::Error500) => return answer(&mut client, "500 Internal Server Error", "InternalError"),
        Some(Fault::SlowDown) => return answer(&mut client, "503 Slow Down", "SlowDown"),
        Some(Fault::NotFound) => return answer(&mut client, "404 Not Found", "NoSuchKey"),
        Some(Fault::Hang) => {
            // Until the client has had enough.
            drop(client.read(&mut [0; 1]));
            return;
        }
        Some(Fault::FlippedUpload) => flip(&mut request.body, shared),
        _ => {}
    }
    let rewrites = {
        let rules = shared.rules.lock().unwrap_or_else(PoisonError::into_inner);
        (rules.rewrite_request, rules.rewrite_answer)
    };
    if let Some(rewrite) = rewrites.0 {
        rewrite(&mut request.head);
    }
    let turn = shared.one_at_a_time.as_ref().map(|turn| turn.lock().unwrap_or_else(PoisonError::into_inner));
    let answered = pass_on(upstream, &request);
    drop(turn);
    let Some(mut answered) = answered else { return };
    if let Some(rewrite) = rewrites.1 {
        rewrite(&mut answered);
    }
    let body_at = head_end(&answered).unwrap_or(answered.len());
    let body_len = answered.len() - body_at;
    match fault {
        Some(Fault::LostAnswer) => {}
        Some(Fault::Error500AfterAll) => answer(&mut client, "500 Internal Server Error", "InternalError"),
        Some(Fault::TruncatedAnswer) => {
            drop(client.write_all(&answered[..body_at + body_len / 2]));
        }
        Some(Fault::FlippedAnswer) if body_len > 0 => {
            flip(&mut answered[body_at..], shared);
            drop(client.write_all(&answered));
        }
        _ => drop(client.write_all(&answered)),
    }
    drop(client.shutdown(Shutdown::Write));
    // Until the client has read it all and closes: a close of ours with bytes on their way could reset.
    drop(client.read(&mut [0; 1]));
}

/// Another place each time: the same damage twice would be no accident of a link.
fn flip(bytes: &mut [u8], shared: &Shared) {
    let number = mixed(17, shared.faults.load(Ordering::SeqCst));
    let at = (number >> 8) as usize % bytes.len();
    bytes[at] ^= 1 << (number & 7);
}

fn answer(client: &mut TcpStream, status: &str, code: &str) {
    let body =
        format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>injected</Message></Error>");
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    drop(client.write_all(format!("{head}{body}").as_bytes()));
    drop(client.shutdown(Shutdown::Write));
    drop(client.read(&mut [0; 1]));
}

fn read_head(client: &mut TcpStream) -> Option<Request> {
    let mut head = Vec::new();
    let mut byte = [0];
    while head_end(&head).is_none() {
        if head.len() > HEAD_BYTES_MAX || client.read(&mut byte).ok()? == 0 {
            return None;
        }
        head.push(byte[0]);
    }
    let text = String::from_utf8_lossy(&head).into_owned();
    let mut words = text.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    Some(Request { method, target, head, body: Vec::new() })
}

fn head_end(bytes: &[u8]) -> Option<usize> {
    // Only the end of what comes byte by byte has to be looked at, but an answer comes whole.
    bytes.windows(4).position(|window| window == b"\r\n\r\n").map(|at| at + 4)
}

fn content_length(head: &[u8]) -> usize {
    let text = String::from_utf8_lossy(head).to_ascii_lowercase();
    let line = text.lines().find_map(|line| line.strip_prefix("content-length:").map(str::to_owned));
    line.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
}

/// The whole answer, as it came.
fn pass_on(upstream: SocketAddr, request: &Request) -> Option<Vec<u8>> {
    let mut server = TcpStream::connect(upstream).ok()?;
    // The server ends the connection after its answer, so its end needs no counting.
    let at = request.head.len() - 2;
    let mut bytes = request.head[..at].to_vec();
    bytes.extend_from_slice(b"Connection: close\r\n\r\n");
    bytes.extend_from_slice(&request.body);
    server.write_all(&bytes).ok()?;
    let mut answered = Vec::new();
    server.read_to_end(&mut answered).ok()?;
    Some(closing(answered))
}

/// Says to the client, too, that the connection ends here.
fn closing(mut answered: Vec<u8>) -> Vec<u8> {
    let Some(end) = head_end(&answered) else { return answered };
    let head = String::from_utf8_lossy(&answered[..end]).to_ascii_lowercase();
    if !head.contains("\r\nconnection: close") {
        let line = b"Connection: close\r\n";
        answered.splice(end - 2..end - 2, line.iter().copied());
    }
    answered
}

/// Takes a header away, whatever its value.
pub(super) fn without_header(head: &mut Vec<u8>, name: &str) {
    let text = String::from_utf8_lossy(head).into_owned();
    let lines = text.split_inclusive("\r\n");
    let kept: String =
        lines.filter(|line| !line.to_ascii_lowercase().starts_with(&format!("{name}:"))).collect();
    *head = kept.into_bytes();
}
