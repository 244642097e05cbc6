//! A real server in this process, over a real database and store; no runner dials in, so no agent runs.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use covey_server::collect::CollectConfig;
use covey_server::db::Db;
use covey_server::http::serve;
use covey_server::model::scripted::ScriptedModel;
use covey_server::stores::Stores;
use covey_server::{Homes, Server};
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
                let script = serde_json::json!({"scripts": [{"seed": 1, "turns": [{"text": "done"}]}]});
                let model = ScriptedModel::new(serde_json::from_value(script).unwrap());
                let homes = Homes { stores, collect: CollectConfig::default() };
                let server =
                    Server::start(Db::open(&db_path).unwrap(), Arc::new(model), Some(homes)).await.unwrap();
                let org = server.default_org();
                let token = server.db().create_token(org, "test").await.unwrap().1;
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
                let url = format!("http://{}", listener.local_addr().unwrap());
                let api = server.api().clone();
                let serving = tokio::spawn(async move { serve(listener, api.router(), &api).await });
                said.send((url, token, org.to_string())).unwrap();
                stopping.cancelled().await;
                server.shutdown().await;
                serving.await.unwrap().unwrap();
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
