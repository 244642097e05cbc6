//! The HTTP client below the S3 library: every request and every answer passes here, so here they are counted and
//! here is seen what the library does not pass on (status, error code, the server's clock).
//!
//! What stays true: what an operation saw is kept with that operation's own task, so operations at once do not mix;
//! requests to anything but the bucket's endpoint (for credentials) are no answers of the bucket. What does not belong
//! here: what an answer means, and trying again.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService,
};

/// Longest wait for a connection. A server that is not there is told from one that is slow.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);
/// An error's body that is longer is no S3 error.
const ERROR_BYTES_MAX: usize = 64 * 1024;
const REGION_HEADER: &str = "x-amz-bucket-region";

tokio::task_local! {
    static SEEN: Arc<Mutex<Answer>>;
}

/// What was seen of the last answer to an operation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    /// A request was sent to the bucket's endpoint.
    pub(crate) asked: bool,
    /// None when no answer came.
    pub(crate) status: Option<u16>,
    /// S3's code of an error; empty where there is none.
    pub(crate) code: String,
    /// Its words.
    pub(crate) message: String,
    /// The region that the bucket is in, if the answer says so.
    pub(crate) region: Option<String>,
    /// Seconds by which the server's clock is ahead of ours; about a second too little or much.
    pub(crate) skew: Option<i64>,
    /// The header, with its quotes.
    pub(crate) etag: Option<String>,
}

/// Does an operation and tells what was seen of its last answer.
pub(crate) async fn seen<T>(operation: impl Future<Output = T>) -> (T, Answer) {
    let answer = Arc::new(Mutex::new(Answer::default()));
    let done = SEEN.scope(Arc::clone(&answer), operation).await;
    let answer = answer.lock().unwrap_or_else(PoisonError::into_inner).clone();
    (done, answer)
}

fn note(change: impl FnOnce(&mut Answer)) {
    // Outside of an operation nobody wants to know.
    let noted = SEEN.try_with(|seen| change(&mut seen.lock().unwrap_or_else(PoisonError::into_inner)));
    if noted.is_err() {
        tracing::trace!("a request outside of an operation");
    }
}

/// Requests to the bucket's endpoint so far, tries that failed among them.
#[derive(Debug, Default)]
pub struct Requests {
    count: AtomicU64,
}

impl Requests {
    /// How many.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

/// Makes the clients for one bucket.
#[derive(Debug, Clone)]
pub(crate) struct Connector {
    endpoint: url::Url,
    client: reqwest::Client,
    requests: Arc<Requests>,
}

impl Connector {
    /// For a bucket behind `endpoint`, an absolute URL.
    ///
    /// # Errors
    /// A sentence, when no TLS client can be made.
    pub(crate) fn new(endpoint: &url::Url, requests: Arc<Requests>) -> Result<Self, String> {
        Ok(Self { client: http_client(endpoint)?, endpoint: endpoint.clone(), requests })
    }
}

impl HttpConnector for Connector {
    // Its options are for the library's own client. Ours has its limits from here and from `Patience`.
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

impl HttpService for Connector {
    fn call<'a, 'async_trait>(
        &'a self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'async_trait>>
    where
        'a: 'async_trait,
        Self: 'async_trait,
    {
        Box::pin(self.exchange(request))
    }
}

impl Connector {
    /// Whether an address is the endpoint's, or that of the bucket's own host below it.
    fn is_ours(&self, address: &url::Url) -> bool {
        let (Some(host), Some(endpoint)) = (address.host_str(), self.endpoint.host_str()) else {
            return false;
        };
        let below = host.strip_suffix(endpoint).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
        below && address.port_or_known_default() == self.endpoint.port_or_known_default()
    }

    async fn exchange(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (parts, body) = request.into_parts();
        let failed = |kind, error: Box<dyn std::error::Error + Send + Sync>| {
            HttpError::new(kind, std::io::Error::other(error))
        };
        let address: url::Url =
            parts.uri.to_string().parse().map_err(|error| failed(HttpErrorKind::Unknown, Box::new(error)))?;
        let is_ours = self.is_ours(&address);
        if is_ours {
            self.requests.count.fetch_add(1, Ordering::Relaxed);
            note(|answer| *answer = Answer { asked: true, ..Answer::default() });
        }
        let mut request = reqwest::Request::new(parts.method, address);
        *request.headers_mut() = parts.headers;
        *request.body_mut() = Some(match body.as_bytes() {
            Some(bytes) => bytes.clone().into(),
            None => reqwest::Body::wrap(body),
        });
        let answered = self.client.execute(request).await.map_err(transport)?;
        let status = answered.status();
        let mut seen = Answer {
            asked: true,
            status: Some(status.as_u16()),
            region: header(&answered, REGION_HEADER),
            skew: header(&answered, "date").and_then(|date| skew(&date, SystemTime::now())),
            etag: header(&answered, "etag"),
            ..Answer::default()
        };
        let answered: http::Response<reqwest::Body> = answered.into();
        let (parts, body) = answered.into_parts();
        let body = HttpResponseBody::new(http_body_util::BodyExt::map_err(body, transport));
        if status.is_success() {
            if is_ours {
                note(|answer| *answer = seen);
            }
            return Ok(HttpResponse::from_parts(parts, body));
        }
        // Short, and wanted by the library and by us. One that breaks off is as good as none: the status says enough.
        let text = body.bytes().await.unwrap_or_default();
        let text = text.slice(..text.len().min(ERROR_BYTES_MAX));
        if is_ours {
            let words = String::from_utf8_lossy(&text);
            seen.code = element(&words, "Code").unwrap_or_default();
            seen.message = element(&words, "Message").unwrap_or_default();
            seen.region = seen.region.or_else(|| element(&words, "Region"));
            note(|answer| *answer = seen);
        }
        Ok(HttpResponse::from_parts(parts, text.into()))
    }
}

fn header(answer: &reqwest::Response, name: &str) -> Option<String> {
    answer.headers().get(name)?.to_str().ok().map(str::to_owned)
}

/// What stands in the first element of this name; S3's errors have no attributes and no entities that matter here.
fn element(text: &str, name: &str) -> Option<String> {
    let (_, behind) = text.split_once(&format!("<{name}>"))?;
    let (inside, _) = behind.split_once(&format!("</{name}>"))?;
    Some(inside.chars().filter(|c| !c.is_control()).take(300).collect())
}

/// Seconds from our clock to the one that wrote an HTTP date (`Sun, 06 Nov 1994 08:49:37 GMT`).
fn skew(date: &str, now: SystemTime) -> Option<i64> {
    const MONTHS: &str = "JanFebMarAprMayJunJulAugSepOctNovDec";
    let mut words = date.split_once(", ")?.1.split(' ');
    let day: i64 = words.next()?.parse().ok()?;
    let month = MONTHS.find(words.next()?).map(|at| at as i64 / 3 + 1)?;
    let year: i64 = words.next()?.parse().ok()?;
    let mut time = words.next()?.split(':').map(|part| part.parse::<i64>().ok());
    let (hour, minute, second) = (time.next()??, time.next()??, time.next()??);
    // Days since 1970 of a date in the Gregorian calendar, counted in years that begin in March.
    let shifted = if month > 2 { year } else { year - 1 };
    let (era, of_era) = (shifted.div_euclid(400), shifted.rem_euclid(400));
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468;
    let theirs = days * 86_400 + hour * 3600 + minute * 60 + second;
    let ours = now.duration_since(UNIX_EPOCH).ok()?.as_secs() as i64;
    Some(theirs - ours)
}

fn transport(error: reqwest::Error) -> HttpError {
    let kind = if error.is_timeout() {
        HttpErrorKind::Timeout
    } else if error.is_connect() {
        HttpErrorKind::Connect
    } else {
        HttpErrorKind::Interrupted
    };
    // Its address may hold what a query string signs.
    let error = error.without_url();
    let mut words = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(inner) = cause {
        words = inner.to_string();
        cause = inner.source();
    }
    HttpError::new(kind, std::io::Error::other(words))
}

fn http_client(endpoint: &url::Url) -> Result<reqwest::Client, String> {
    // Process-wide; a second installation is refused and changes nothing.
    if rustls::crypto::CryptoProvider::get_default().is_none()
        && rustls::crypto::ring::default_provider().install_default().is_err()
    {
        tracing::debug!("another thread installed the TLS provider first");
    }
    let mut builder = reqwest::Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(CONNECT_TIME_MAX)
        .http1_only()
        .user_agent(concat!("covey/", env!("CARGO_PKG_VERSION")));
    if endpoint.scheme() == "http" {
        // Without this a machine that has no CA certificates could not even talk to a bucket of its own.
        let roots = rustls::RootCertStore::empty();
        let config = rustls::ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        builder = builder.tls_backend_preconfigured(config);
    }
    builder.build().map_err(|error| format!("no TLS client can be made: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_servers_clock_is_read_from_its_date() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        assert_eq!(skew("Sun, 06 Nov 1994 08:49:37 GMT", at(784_111_777)), Some(0));
        assert_eq!(skew("Sun, 06 Nov 1994 08:49:37 GMT", at(784_111_177)), Some(600));
        assert_eq!(skew("Thu, 29 Feb 2024 00:00:00 GMT", at(1_709_164_800)), Some(0));
        assert_eq!(skew("Thu, 01 Jan 1970 00:00:01 GMT", at(0)), Some(1));
        for odd in ["", "yesterday", "Sun, 06 Xyz 1994 08:49:37 GMT", "Sun, 06 Nov 1994 08:49 GMT"] {
            assert_eq!(skew(odd, at(0)), None, "{odd}");
        }
    }

    #[test]
    fn an_errors_elements_are_found() {
        let text = "<Error><Code>NoSuchBucket</Code><Message>a\nb</Message></Error>";
        assert_eq!(element(text, "Code").as_deref(), Some("NoSuchBucket"));
        assert_eq!(element(text, "Message").as_deref(), Some("ab"));
        assert_eq!(element(text, "Region"), None);
    }
}
