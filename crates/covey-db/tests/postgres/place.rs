//! A database of its own for each test.

use covey_db::postgres::{Location, Postgres};
use tokio::task::JoinSet;
use tokio_postgres::{Client, NoTls};
use uuid::Uuid;

/// A fresh database. It goes with the server, which the stage ends.
pub(crate) struct Place {
    server: tokio_postgres::Config,
    pub(crate) name: String,
}

/// A connection of the superuser.
pub(crate) struct Raw {
    pub(crate) client: Client,
    _task: JoinSet<()>,
}

/// Where the server is.
pub(crate) fn server() -> tokio_postgres::Config {
    let text = std::env::var("COVEY_TEST_POSTGRES");
    let text = text.expect("COVEY_TEST_POSTGRES is not set: run `cargo xtask test --stage postgres`");
    text.parse().expect("COVEY_TEST_POSTGRES is a database URL")
}

async fn raw(config: &tokio_postgres::Config) -> Raw {
    let (client, connection) = config.connect(NoTls).await.expect("the test server answers");
    let mut task = JoinSet::new();
    task.spawn(async move { drop(connection.await) });
    Raw { client, _task: task }
}

impl Place {
    pub(crate) async fn fresh() -> Self {
        let server = server();
        let name = format!("covey_{}", Uuid::now_v7().simple());
        raw(&server).await.client.batch_execute(&format!("CREATE DATABASE {name}")).await.unwrap();
        Self { server, name }
    }

    /// A URL of the database at `port`, or at the server's own.
    pub(crate) fn url(&self, port: Option<u16>) -> String {
        let user = self.server.get_user().unwrap();
        let password = String::from_utf8_lossy(self.server.get_password().unwrap()).into_owned();
        let port = port.unwrap_or_else(|| self.port());
        format!("postgres://{user}:{password}@127.0.0.1:{port}/{}", self.name)
    }

    pub(crate) fn port(&self) -> u16 {
        self.server.get_ports()[0]
    }

    pub(crate) fn location(&self) -> Location {
        Location::parse(&self.url(None)).unwrap()
    }

    /// Another server's handle.
    pub(crate) async fn connect(&self) -> Postgres {
        Postgres::connect(&self.location()).await.unwrap()
    }

    /// A connection beside all handles.
    pub(crate) async fn raw(&self) -> Raw {
        let mut config = self.server.clone();
        raw(config.dbname(&self.name)).await
    }
}
