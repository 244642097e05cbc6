//! The server's own API over a real database and store, in this process; no agent runs.

use std::path::{Path, PathBuf};
use std::thread;

use covey_server::db::{Db, orgs, tokens};
use covey_server::http::{Api, serve};
use covey_server::stores::Stores;
use tokio_util::sync::CancellationToken;

/// A running server; it ends with the value.
pub(crate) struct RealServer {
    pub(crate) url: String,
    pub(crate) token: String,
    pub(crate) org: String,
    pub(crate) store: PathBuf,
    stop: CancellationToken,
    thread: Option<thread::JoinHandle<()>>,
}

impl RealServer {
    /// Keeps its database and store in `dir`.
    pub(crate) fn start(dir: &Path) -> Self {
        let (stop, store) = (CancellationToken::new(), dir.join("server-store"));
        let (said, told) = std::sync::mpsc::channel();
        let (db_path, stores, stopping) =
            (dir.join("covey.db"), Stores::in_directory(store.clone(), None), stop.clone());
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            runtime.block_on(async {
                let db = Db::open(&db_path).unwrap();
                let org = db.write("org", orgs::ensure_default).await.unwrap();
                let (_, token) = db.write("token", move |tx| tokens::create(tx, org, "test")).await.unwrap();
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
                let url = format!("http://{}", listener.local_addr().unwrap());
                let api = Api::new(db, Some(stores), stopping);
                said.send((url, token, org.to_string())).unwrap();
                serve(listener, api.router(), &api).await.unwrap();
            });
        });
        let (url, token, org) = told.recv().unwrap();
        Self { url, token, org, store, stop, thread: Some(thread) }
    }
}

impl Drop for RealServer {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}
