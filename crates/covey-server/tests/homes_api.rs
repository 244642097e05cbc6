//! Homes over the public API: looking into snapshots, comparing them, putting them back, archives and rules, on a real
//! store and over real HTTP.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use covey_home::{Excludes, NoProgress, PackStore, SecureReport, SecureRequest};
use covey_server::Homes;
use covey_server::collect::CollectConfig;
use covey_server::db::Db;
use covey_server::http::{Api, serve};
use covey_server::stores::Stores;
use covey_types::{HomeId, OrgId, RunnerId};
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

struct World {
    dir: tempfile::TempDir,
    db: Db,
    url: String,
    http: reqwest::Client,
    org: OrgId,
    token: String,
    strangers_token: String,
    agent: Value,
    home: HomeId,
}

impl World {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::open(&dir.path().join("covey.db")).unwrap();
        let org = db.ensure_default_org().await.unwrap();
        let other = db.create_org("other").await.unwrap();
        let (_, token) = db.create_token(org, "test").await.unwrap();
        let (_, strangers_token) = db.create_token(other, "test").await.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let stores = Stores::in_directory(dir.path().join("store"), None);
        let api = Api::new(
            db.clone(),
            Some(Homes { stores, collect: CollectConfig::default() }),
            None,
            CancellationToken::new(),
        );
        tokio::spawn(async move { serve(listener, api.router(), &api).await });
        rustls::crypto::ring::default_provider().install_default().unwrap_or_default();
        let config = rustls::ClientConfig::builder()
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        let http = reqwest::Client::builder().tls_backend_preconfigured(config).build().unwrap();
        let home = HomeId::from_uuid(Uuid::nil());
        let agent = Value::Null;
        let mut world = Self { dir, db, url, http, org, token, strangers_token, agent, home };
        world.agent = world.send(Method::POST, "/v1/agents", json!({"name": "a", "model": "m"})).await;
        world.home = world.agent["covey_home_id"].as_str().unwrap().parse().unwrap();
        world
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("{}{path}", self.url)).bearer_auth(&self.token)
    }

    fn of_home(&self, what: &str) -> String {
        format!("/v1/covey/homes/{}/{what}", self.home)
    }

    async fn answer(&self, request: RequestBuilder) -> (StatusCode, Value) {
        let response = request.send().await.unwrap();
        (response.status(), response.json().await.unwrap())
    }

    async fn send(&self, method: Method, path: &str, body: Value) -> Value {
        let (status, body) = self.answer(self.request(method, path).json(&body)).await;
        assert_eq!(status, StatusCode::OK, "{path}: {body}");
        body
    }

    async fn get(&self, what: &str) -> Value {
        let (status, body) = self.answer(self.request(Method::GET, &self.of_home(what))).await;
        assert_eq!(status, StatusCode::OK, "{what}: {body}");
        body
    }

    async fn post(&self, what: &str, body: Value) -> Value {
        self.send(Method::POST, &self.of_home(what), body).await
    }

    async fn refused(&self, method: Method, what: &str, body: Value) -> (u16, String) {
        let (status, body) = self.answer(self.request(method, &self.of_home(what)).json(&body)).await;
        assert!(!status.is_success(), "{what}: {body}");
        (status.as_u16(), body["error"]["message"].as_str().unwrap().to_owned())
    }

    fn dir(&self) -> std::path::PathBuf {
        self.dir.path().join("files")
    }

    fn secure(&self) -> SecureReport {
        let store = PackStore::open_directory(&self.dir.path().join("store"), &self.org.to_string()).unwrap();
        covey_home::secure(&SecureRequest {
            dir: &self.dir(),
            store: &store,
            stat_cache: None,
            excludes: &Excludes::none(),
            previous: None,
            cancel: &AtomicBool::new(false),
            progress: &NoProgress,
            threads: 1,
        })
        .unwrap()
    }

    /// Secures the directory as it is and makes it the home's current snapshot.
    async fn publish(&self) -> u64 {
        let report = self.secure();
        let body = json!({"root": report.root, "epoch": report.epoch});
        self.post("import", body).await["generation"].as_u64().unwrap()
    }
}

/// Bytes that do not compress.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| next()).collect()
}

fn write(dir: &Path, path: &str, text: impl AsRef<[u8]>) {
    let path = dir.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn paths(answer: &Value) -> Vec<&str> {
    answer["data"].as_array().unwrap().iter().map(|entry| entry["path"].as_str().unwrap()).collect()
}

/// Two generations: a source tree, then a run that changed it.
async fn two_generations() -> World {
    let world = World::start().await;
    let dir = world.dir();
    write(&dir, "src/main.rs", "fn main() {\n    work();\n}\n");
    write(&dir, "src/old.rs", "// old\n");
    write(&dir, "data.bin", [0, 159, 146, 150]);
    std::os::unix::fs::symlink("src/main.rs", dir.join("link")).unwrap();
    assert_eq!(world.publish().await, 1);
    write(&dir, "src/main.rs", "fn main() {\n    work_well();\n}\n");
    fs::remove_file(dir.join("src/old.rs")).unwrap();
    write(&dir, "new/notes.txt", "done\n");
    write(&dir, "data.bin", [0, 1]);
    let hole = fs::File::create(dir.join("hole")).unwrap();
    hole.set_len(1 << 20).unwrap();
    assert_eq!(world.publish().await, 2);
    world
}

#[tokio::test]
async fn a_tree_is_listed_in_order_and_in_pages_that_skip_nothing() {
    let world = two_generations().await;
    let top = world.get("tree").await;
    assert_eq!(paths(&top), ["data.bin", "hole", "link", "new", "src"]);
    assert_eq!((&top["generation"], &top["entry"]["kind"]), (&json!(2), &json!("directory")));
    assert_eq!(top["data"][2]["target"], "src/main.rs");
    assert_eq!(top["data"][1]["size"], 1 << 20);
    let all = ["data.bin", "hole", "link", "new", "new/notes.txt", "src", "src/main.rs"];
    assert_eq!(paths(&world.get("tree?recursive=true").await), all);
    let (mut seen, mut page) = (Vec::new(), String::new());
    loop {
        let part = world.get(&format!("tree?recursive=true&limit=2{page}")).await;
        seen.extend(paths(&part).iter().map(|path| (*path).to_owned()));
        let Some(next) = part["next_page"].as_str() else { break };
        page = format!("&page={next}");
    }
    assert_eq!(seen, all);
    let earlier = world.get("tree?generation=-1&path=src").await;
    assert_eq!((paths(&earlier), &earlier["generation"]), (vec!["src/main.rs", "src/old.rs"], &json!(1)));
    let file = world.get("tree?path=src/main.rs").await;
    assert_eq!((&file["entry"]["kind"], paths(&file).len()), (&json!("file"), 0));
    for (what, status, said) in [
        ("tree?path=nothing", 404, "`nothing` is not in the snapshot"),
        ("tree?path=../x", 400, "no path in a home"),
        ("tree?generation=9", 404, "9 of"),
        ("tree?generation=x", 400, "names no generation"),
        ("tree?page=x", 400, "next_page"),
    ] {
        let (found, message) = world.refused(Method::GET, what, Value::Null).await;
        assert_eq!(found, status, "{what}: {message}");
        assert!(message.contains(said), "{what}: {message}");
    }
}

#[tokio::test]
async fn a_file_is_read_whole_and_in_parts_and_what_is_no_file_says_what_it_is() {
    let world = two_generations().await;
    let file = |query: &str| world.request(Method::GET, &world.of_home(&format!("file?{query}")));
    let whole = file("path=src/main.rs&generation=1").send().await.unwrap();
    assert_eq!(whole.headers()["covey-generation"], "1");
    assert_eq!(whole.headers()["x-content-type-options"], "nosniff");
    assert_eq!(whole.text().await.unwrap(), "fn main() {\n    work();\n}\n");
    let part = file("path=src/main.rs").header("range", "bytes=3-6").send().await.unwrap();
    assert_eq!(part.status(), StatusCode::PARTIAL_CONTENT);
    assert_eq!(part.headers()["content-range"], "bytes 3-6/31");
    assert_eq!(part.text().await.unwrap(), "main");
    let zeros = file("path=hole").send().await.unwrap().bytes().await.unwrap();
    assert!(zeros.len() == 1 << 20 && zeros.iter().all(|byte| *byte == 0));
    let beyond = file("path=src/main.rs").header("range", "bytes=900-").send().await.unwrap();
    assert_eq!(beyond.status(), StatusCode::RANGE_NOT_SATISFIABLE);
    for (what, said) in [
        ("file?path=link", "a symbolic link to `src/main.rs`"),
        ("file?path=src", "is a directory"),
        ("file?path=data.bin/x", "is not a directory"),
    ] {
        let (status, message) = world.refused(Method::GET, what, Value::Null).await;
        assert!(status == 400 && message.contains(said), "{what}: {status} {message}");
    }
    assert_eq!(world.refused(Method::GET, "file?path=nothing", Value::Null).await.0, 404);
}

#[tokio::test]
async fn a_block_that_is_gone_breaks_the_answer_off_and_never_shortens_it() {
    let world = World::start().await;
    let bytes = noise(1, 20 << 20);
    write(&world.dir(), "large", &bytes);
    world.publish().await;
    let whole = world.request(Method::GET, &world.of_home("file?path=large")).send().await.unwrap();
    assert!(whole.bytes().await.unwrap() == bytes);
    // The packs' ends hold the index; the middle holds the file.
    let packs = world.dir.path().join("store/orgs").join(world.org.to_string()).join("packs");
    let mut damaged = 0;
    for pack in fs::read_dir(packs).unwrap().map(Result::unwrap) {
        let mut stored = fs::read(pack.path()).unwrap();
        if stored.len() > 8 << 20 {
            let middle = stored.len() / 2;
            stored[middle..middle + 64].fill(0);
            fs::write(pack.path(), stored).unwrap();
            damaged += 1;
        }
    }
    assert_eq!(damaged, 1);
    let broken = world.request(Method::GET, &world.of_home("file?path=large")).send().await.unwrap();
    assert_eq!(broken.status(), StatusCode::OK);
    assert!(broken.bytes().await.is_err(), "the answer must not look whole");
    let archive = world.request(Method::GET, &world.of_home("archive")).send().await.unwrap();
    assert!(archive.bytes().await.is_err(), "the archive must not look whole");
}

#[tokio::test]
async fn two_snapshots_are_compared_as_paths_and_as_texts() {
    let world = two_generations().await;
    let plain = world.get("diff").await;
    let told: Vec<(&str, &str)> = plain["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|change| (change["path"].as_str().unwrap(), change["change"].as_str().unwrap()))
        .filter(|(_, change)| *change != "metadata")
        .collect();
    assert_eq!(
        told,
        [
            ("data.bin", "modified"),
            ("hole", "added"),
            ("new", "added"),
            ("new/notes.txt", "added"),
            ("src/main.rs", "modified"),
            ("src/old.rs", "removed"),
        ]
    );
    assert_eq!((&plain["from"]["generation"], &plain["to"]["generation"]), (&json!(1), &json!(2)));
    let texts = world.get("diff?texts=true&from=1&to=2&path=src").await;
    let main = texts["data"].as_array().unwrap().iter().find(|c| c["path"] == "src/main.rs").unwrap();
    let text = main["text"].as_str().unwrap();
    assert!(text.starts_with("--- a/src/main.rs\n+++ b/src/main.rs\n@@ "), "{text}");
    assert!(text.contains("-    work();\n+    work_well();\n"), "{text}");
    assert!(paths(&texts).iter().all(|path| path.starts_with("src")), "{texts}");
    let removed = texts["data"].as_array().unwrap().iter().find(|c| c["path"] == "src/old.rs").unwrap();
    assert!(removed["text"].as_str().unwrap().contains("+++ /dev/null\n"), "{removed}");
    let all = world.get("diff?texts=true").await;
    let why = |path: &str| {
        let found = all["data"].as_array().unwrap().iter().find(|change| change["path"] == path).unwrap();
        found["without_text"].clone()
    };
    assert_eq!((why("data.bin"), why("hole"), why("new")), (json!("binary"), json!("binary"), Value::Null));
    let (mut seen, mut page) = (Vec::new(), String::new());
    loop {
        let part = world.get(&format!("diff?limit=2{page}")).await;
        seen.extend(paths(&part).iter().map(|path| (*path).to_owned()));
        let Some(next) = part["next_page"].as_str() else { break };
        page = format!("&page={next}");
    }
    assert_eq!(seen, paths(&plain));
    let from_nothing = world.get("diff?from=0&to=1").await;
    assert_eq!(from_nothing["from"], Value::Null);
    assert_eq!(paths(&from_nothing), ["", "data.bin", "link", "src", "src/main.rs", "src/old.rs"]);
}

#[tokio::test]
async fn a_path_or_the_whole_home_is_put_back_as_a_new_generation() {
    let world = two_generations().await;
    let one = world.post("restore", json!({"generation": 1, "path": "src/old.rs"})).await;
    assert_eq!(one["generation"], 3);
    assert_eq!(paths(&world.get("tree?path=src").await), ["src/main.rs", "src/old.rs"]);
    let kept = world.request(Method::GET, &world.of_home("file?path=src/main.rs")).send().await.unwrap();
    assert!(kept.text().await.unwrap().contains("work_well"), "what was not named stays");
    let whole = world.post("restore", json!({"generation": "-2"})).await;
    assert_eq!(whole["generation"], 4);
    let log = world.get("snapshots").await;
    assert_eq!(log["data"][0]["root"], log["data"][3]["root"]);
    let origin = |at: usize| (log["data"][at]["origin"].clone(), log["data"][at]["from_generation"].clone());
    assert_eq!([origin(0), origin(1)], [(json!("restored"), json!(1)), (json!("restored"), json!(1))]);
    assert_eq!(log["data"][0]["kept_by"], "current");
    assert_eq!(log["data"][1]["kept_by"], Value::Null);
    for (body, status, said) in [
        (json!({}), 400, "`generation` is missing"),
        (json!({"generation": 7}), 404, "7 of"),
        (json!({"generation": 1, "path": "nothing"}), 404, "`nothing`"),
        (json!({"generation": 1, "base_generation": 2}), 409, "at generation 4, not 2"),
        (json!({"generation": 1, "path": "src/old.rs", "base_generation": 2}), 409, "at generation 4, not 2"),
    ] {
        let (found, message) = world.refused(Method::POST, "restore", body.clone()).await;
        assert!(found == status && message.contains(said), "{body}: {found} {message}");
    }
    // A sandbox works in it.
    let environment = world.send(Method::POST, "/v1/environments", json!({"name": "e"})).await;
    let body = json!({"agent": world.agent["id"], "environment_id": environment["id"]});
    let session = world.send(Method::POST, "/v1/sessions", body).await;
    let (org, home) = (world.org, world.home);
    let id = session["id"].as_str().unwrap().parse().unwrap();
    let runner = RunnerId::from_uuid(Uuid::nil());
    world.db.claim_home(org, home, id, None, runner).await.unwrap();
    for (what, body) in [
        ("restore", json!({"generation": 2})),
        ("restore", json!({"generation": 2, "path": "hole"})),
        ("fork", json!({"agent_id": world.agent["id"]})),
    ] {
        let (status, message) = world.refused(Method::POST, what, body).await;
        assert!(status == 409 && message.contains("acts on home"), "{status} {message}");
    }
    let put = world.request(Method::PUT, &world.of_home("archive")).body(vec![0; 1024]);
    let (status, body) = world.answer(put).await;
    assert_eq!(status, StatusCode::CONFLICT, "{body}");
}

#[tokio::test]
async fn a_fork_is_another_agents_home_with_the_same_bytes() {
    let world = two_generations().await;
    let forked = world.post("fork", json!({"generation": 1, "name": "twin"})).await;
    assert_eq!(forked["generation"], 1);
    let agent = world
        .answer(world.request(Method::GET, &format!("/v1/agents/{}", forked["agent_id"].as_str().unwrap())));
    let agent = agent.await.1;
    assert_eq!((&agent["name"], &agent["model"]["id"]), (&json!("twin"), &json!("m")));
    let tree = format!("/v1/covey/homes/{}/tree?recursive=true", forked["id"].as_str().unwrap());
    let tree = world.answer(world.request(Method::GET, &tree)).await.1;
    assert_eq!(tree["data"], world.get("tree?recursive=true&generation=1").await["data"]);
    let into = world.post("fork", json!({"agent_id": forked["agent_id"]})).await;
    assert_eq!((&into["id"], &into["generation"]), (&forked["id"], &json!(2)));
    let both = json!({"agent_id": forked["agent_id"], "name": "x"});
    assert_eq!(world.refused(Method::POST, "fork", both).await.0, 400);
}

#[tokio::test]
async fn an_archive_goes_out_and_comes_back_as_the_same_state() {
    let world = two_generations().await;
    let root = world.get("snapshots").await["data"][0]["root"].clone();
    let archive = world.request(Method::GET, &world.of_home("archive")).send().await.unwrap();
    assert_eq!(archive.headers()["content-type"], "application/x-tar");
    let archive = archive.bytes().await.unwrap();
    world.post("restore", json!({"generation": 1})).await;
    let put = world.request(Method::PUT, &world.of_home("archive?base_generation=3")).body(archive.clone());
    let (status, imported) = world.answer(put).await;
    assert_eq!(status, StatusCode::OK, "{imported}");
    assert_eq!((&imported["root"], &imported["generation"]), (&root, &json!(4)));
    assert_eq!(imported["entries"], 8);
    let put = |query: &str, body: Vec<u8>| {
        world.answer(world.request(Method::PUT, &world.of_home(&format!("archive{query}"))).body(body))
    };
    let old = put("?base_generation=3", archive.to_vec()).await;
    assert_eq!(old.0, StatusCode::CONFLICT, "{}", old.1);
    let cut = put("", archive[..archive.len() - 2048].to_vec()).await;
    assert_eq!(cut.0, StatusCode::BAD_REQUEST, "{}", cut.1);
    let noise = put("", vec![7; 4 << 20]).await;
    assert_eq!(noise.0, StatusCode::BAD_REQUEST, "{}", noise.1);
    assert_eq!(world.get("snapshots").await["data"].as_array().unwrap().len(), 4);
}

#[tokio::test]
async fn usage_says_where_the_bytes_are_and_whose() {
    let world = two_generations().await;
    let usage = world.get("usage?shares=true&parts=2").await;
    assert_eq!(
        (&usage["files"], &usage["directories"], &usage["entries"]),
        (&json!(4), &json!(2), &json!(7))
    );
    assert_eq!(usage["largest_files"][0]["path"], "hole");
    assert_eq!(usage["snapshots"], 2);
    assert!(usage["exclusive_bytes"].as_u64().unwrap() > 0 && usage["shared_bytes"] == 0, "{usage}");
    world.post("fork", json!({})).await;
    let shared = world.get("usage?shares=true").await;
    assert!(shared["shared_bytes"].as_u64().unwrap() > 0, "{shared}");
    assert!(shared["exclusive_bytes"].as_u64() < usage["exclusive_bytes"].as_u64(), "{shared}");
    assert_eq!(world.get("usage").await["shared_bytes"], Value::Null);
    let below = world.get("usage?path=src&generation=1").await;
    assert_eq!((&below["files"], &below["path"]), (&json!(2), &json!("src")));
}

#[tokio::test]
async fn rules_are_set_one_by_one_and_a_slip_of_the_pen_is_refused() {
    let world = two_generations().await;
    let set = world
        .send(Method::PUT, &world.of_home("rules"), json!({"keep_newest": 5, "bytes_max": 2 << 20}))
        .await;
    assert_eq!((&set["keep_newest"], &set["effective"]["bytes_max"]), (&json!(5), &json!(2 << 20)));
    let org = json!({"files_max": 3, "org_bytes_max": 9 << 20});
    let org = world.send(Method::PUT, "/v1/covey/rules", org).await;
    assert_eq!((&org["files_max"], &org["org_bytes"]), (&json!(3), &json!((1 << 20) + 31 + 5 + 2)));
    let set = world.send(Method::PUT, &world.of_home("rules"), json!({"keep_newest": null})).await;
    assert_eq!((&set["keep_newest"], &set["bytes_max"]), (&Value::Null, &json!(2 << 20)));
    assert_eq!((&set["files_max"], &set["effective"]["files_max"]), (&Value::Null, &json!(3)));
    let (status, message) = world.refused(Method::PUT, "rules", json!({"byte_max": 1})).await;
    assert!(status == 400 && message.contains("`byte_max` is no rule"), "{message}");
    assert_eq!(world.refused(Method::PUT, "rules", json!({"bytes_max": -1})).await.0, 400);
    assert_eq!(world.refused(Method::PUT, "rules", json!({"bytes_max": u64::MAX})).await.0, 400);
    // What has no limit of its own has the org's: four files are more than three.
    write(&world.dir(), "more", "x");
    let report = world.secure();
    let body = json!({"root": report.root, "epoch": report.epoch});
    let (status, message) = world.refused(Method::POST, "import", body).await;
    assert!(status == 413 && message.contains("files of at most 3"), "{status} {message}");
}

#[tokio::test]
async fn a_root_that_is_not_in_the_store_is_not_imported_and_a_strangers_home_does_not_exist() {
    let world = two_generations().await;
    let (status, message) = world.refused(Method::POST, "import", json!({"root": "0".repeat(64)})).await;
    assert!(status == 400 && message.contains("no such state"), "{message}");
    for (method, what, body) in [
        (Method::GET, "tree", Value::Null),
        (Method::GET, "file?path=hole", Value::Null),
        (Method::GET, "diff", Value::Null),
        (Method::GET, "usage", Value::Null),
        (Method::GET, "archive", Value::Null),
        (Method::PUT, "archive", Value::Null),
        (Method::POST, "restore", json!({"generation": 1})),
        (Method::POST, "restore", json!({"generation": 1, "path": "hole"})),
        (Method::POST, "fork", json!({})),
        (Method::POST, "import", json!({"root": "0".repeat(64)})),
        (Method::GET, "rules", Value::Null),
        (Method::PUT, "rules", json!({"keep_newest": 1})),
    ] {
        let url = format!("{}{}", world.url, world.of_home(what));
        let request = world.http.request(method.clone(), url);
        let (status, body) = world.answer(request.bearer_auth(&world.strangers_token).json(&body)).await;
        assert_eq!(status, StatusCode::NOT_FOUND, "{method} {what}: {body}");
    }
}
