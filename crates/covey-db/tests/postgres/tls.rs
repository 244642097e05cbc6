//! TLS to the database. The server of the tests has none, so a relay before it speaks it, as a real one would: it answers
//! the request for TLS and passes on what is inside. Its certificate names 127.0.0.1 and is trusted by nobody else.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use covey_db::DbError;
use covey_db::postgres::{Location, Postgres, migrate};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use crate::place::Place;

const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f];

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/postgres").join(name)
}

struct Relay {
    port: u16,
    handshakes: Arc<AtomicUsize>,
    _task: JoinSet<()>,
}

impl Relay {
    async fn start(server_port: u16) -> Self {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![CertificateDer::from_pem_file(file("certificate.pem")).unwrap()],
                PrivateKeyDer::from_pem_file(file("key.pem")).unwrap(),
            )
            .unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let handshakes = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&handshakes);
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut relays = JoinSet::new();
            loop {
                let (mut client, _) = listener.accept().await.unwrap();
                let (acceptor, counted) = (acceptor.clone(), Arc::clone(&counted));
                relays.spawn(async move {
                    let mut request = [0; 8];
                    client.read_exact(&mut request).await.unwrap();
                    assert_eq!(request, SSL_REQUEST, "it began without asking for TLS");
                    client.write_all(b"S").await.unwrap();
                    // A client that does not trust us goes away here.
                    let Ok(mut inside) = acceptor.accept(client).await else { return };
                    counted.fetch_add(1, Ordering::SeqCst);
                    let mut server = TcpStream::connect(("127.0.0.1", server_port)).await.unwrap();
                    // However it ends, it has ended.
                    drop(tokio::io::copy_bidirectional(&mut inside, &mut server).await);
                });
            }
        });
        Self { port, handshakes, _task: task }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_is_checked_against_the_authorities_that_are_named() {
    let place = Place::fresh().await;
    let relay = Relay::start(place.port()).await;
    let url = place.url(Some(relay.port));
    let root = file("certificate.pem").display().to_string();
    for (trusting, handshakes) in [
        (format!("{url}?sslmode=verify-full&sslrootcert={root}"), 1),
        (format!("{url}?sslrootcert={root}"), 2),
        // As everywhere: hidden from who only listens.
        (format!("{url}?sslmode=prefer"), 3),
        (url.clone(), 4),
    ] {
        migrate(&Location::parse(&trusting).unwrap()).await.unwrap();
        assert_eq!(relay.handshakes.load(Ordering::SeqCst), handshakes, "{trusting}");
    }
    let elsewhere = url.replace("127.0.0.1", "localhost");
    for distrusting in [
        format!("{url}?sslmode=require"),
        format!("{url}?sslmode=verify-full"),
        format!("{elsewhere}?sslmode=verify-full&sslrootcert={root}"),
    ] {
        let error = migrate(&Location::parse(&distrusting).unwrap()).await.unwrap_err();
        assert!(matches!(error, DbError::Refused { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("TLS") && text.contains("sslrootcert"), "{text}");
    }
    let store =
        Postgres::connect(&Location::parse(&format!("{url}?sslrootcert={root}")).unwrap()).await.unwrap();
    let db: covey_db::Db = store.into();
    let org = db.take_over().await.unwrap();
    assert_eq!(db.all_orgs().await.unwrap(), [org]);
}
