//! The power goes: a file system is copied as its disk has it at a random moment, without what its kernel still holds in
//! memory, while processes work on a store in it. On the copy, after the journal's replay, everything that was
//! acknowledged before must be whole.
//!
//! The disk is a file with an ext4 in it, mounted through a loop device. Only what was written back has reached that
//! file. It lies in an XFS of its own, which clones it in one step, so the copy is one moment of the disk.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use serde_json::json;

use super::worker::{Program, ROLES, add_newest};
use crate::chaos::Dice;
use crate::process;

const COMMAND_LIMIT: Duration = Duration::from_secs(120);
const DELAY_MAX: Duration = Duration::from_millis(400);
/// The file system that clones, and the disk that loses its power.
const OUTER_BYTES: u64 = 6 << 30;
const DISK_BYTES: u64 = 1 << 30;
/// Written before each cut and not flushed: it shows that a cut forgets what was not flushed.
const MARKER_BYTES: usize = 256 * 1024;

/// What to run.
#[derive(Debug, Args)]
pub(crate) struct CutPowerArgs {
    /// How many cuts.
    #[arg(long, default_value_t = 30)]
    pub(crate) cuts: u32,
    /// Seed of the moments and roles.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// A `store-worker` that is built already [default: it is built in release mode].
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) worker: Option<PathBuf>,
    /// Print one JSON object as the last line.
    #[arg(long)]
    pub(crate) json: bool,
}

/// A mounted file system; unmounted when dropped.
#[derive(Debug)]
struct Mounted(PathBuf);

impl Mounted {
    fn image(image: &Path, at: PathBuf) -> anyhow::Result<Self> {
        fs::create_dir_all(&at)?;
        let mut mount = Command::new("mount");
        process::run(mount.args(["-o", "loop,noatime"]).arg(image).arg(&at), COMMAND_LIMIT)?;
        Ok(Self(at))
    }

    fn end(self) -> anyhow::Result<()> {
        let at = self.0.clone();
        std::mem::forget(self);
        process::run(Command::new("umount").arg(at), COMMAND_LIMIT)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Err(error) = process::run(Command::new("umount").arg("--lazy").arg(&self.0), COMMAND_LIMIT) {
            eprintln!("{}: {error:#}", self.0.display());
        }
    }
}

fn make_image(path: &Path, bytes: u64, mkfs: &[&str]) -> anyhow::Result<()> {
    fs::File::create(path)?.set_len(bytes)?;
    let [program, args @ ..] = mkfs else { anyhow::bail!("no program") };
    process::output_of_success(Command::new(program).args(args).arg(path), COMMAND_LIMIT).map(drop)
}

pub(crate) fn run(root: &Path, args: &CutPowerArgs) -> anyhow::Result<()> {
    anyhow::ensure!(rustix::process::geteuid().is_root(), "mounting needs root; run it as root");
    for program in ["mkfs.xfs", "mkfs.ext4", "mount", "umount", "cp"] {
        anyhow::ensure!(
            process::exists(program),
            "`{program}` is not installed (packages xfsprogs, e2fsprogs)"
        );
    }
    let began = Instant::now();
    let program = Program::find(root, args.worker.as_deref())?;
    let scratch = tempfile::tempdir()?;
    let outer_image = scratch.path().join("outer.img");
    make_image(&outer_image, OUTER_BYTES, &["mkfs.xfs", "-q", "-m", "reflink=1"])?;
    let outer = Mounted::image(&outer_image, scratch.path().join("outer"))?;
    let disk = outer.0.join("disk.img");
    make_image(&disk, DISK_BYTES, &["mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0"])?;
    let mounted = Mounted::image(&disk, scratch.path().join("disk"))?;
    let dir = mounted.0.join("work");
    fs::create_dir(&dir)?;
    let mut totals = Totals::default();
    let mut dice = Dice::new(args.seed);
    for number in 0..args.cuts {
        let cut = outer.0.join("cut.img");
        totals.cut(&program, &dir, (&disk, &cut), &mut dice, number)?;
        let copy = Mounted::image(&cut, scratch.path().join("cut"))?;
        let marker = fs::read(copy.0.join(marker_name(number))).unwrap_or_default();
        totals.forgotten += u32::from(marker != vec![1; MARKER_BYTES]);
        let checked = program.check(&copy.0.join("work"), &totals.acknowledged);
        copy.end()?;
        if let Err(error) = checked {
            totals.failures.push(format!("cut {number}: {error:#}"));
            break;
        }
        fs::remove_file(&cut)?;
        fs::remove_file(mounted.0.join(marker_name(number)))?;
        if (number + 1) % 10 == 0 {
            eprintln!("{} of {} cuts", number + 1, args.cuts);
        }
    }
    mounted.end()?;
    outer.end()?;
    // A cut that forgets nothing proves nothing.
    let forgets = totals.forgotten * 10 >= totals.cuts * 8;
    let ok = totals.failures.is_empty() && totals.cuts == args.cuts && forgets;
    let report = json!({
        "ok": ok,
        "cuts": totals.cuts,
        "wanted": args.cuts,
        "seed": args.seed,
        "unflushed_forgotten": totals.forgotten,
        "busy_workers": totals.busy,
        "published": totals.acknowledged,
        "failures": totals.failures,
        "elapsed_ms": began.elapsed().as_millis() as u64,
    });
    if args.json {
        println!("{report}");
    } else {
        println!("{} cuts, {} of which forgot what was not flushed", totals.cuts, totals.forgotten);
    }
    anyhow::ensure!(ok, "a power cut lost what was acknowledged, or forgot nothing: {report}");
    Ok(())
}

fn marker_name(number: u32) -> String {
    format!("marker-{number}")
}

#[derive(Debug, Default)]
struct Totals {
    cuts: u32,
    /// Cuts that forgot the marker.
    forgotten: u32,
    /// Workers that were at work when the power went.
    busy: u32,
    acknowledged: BTreeMap<String, u64>,
    failures: Vec<String>,
}

impl Totals {
    /// Lets two workers work and clones the disk beneath them.
    fn cut(
        &mut self,
        program: &Program,
        dir: &Path,
        (disk, cut): (&Path, &Path),
        dice: &mut Dice,
        number: u32,
    ) -> anyhow::Result<()> {
        // One of them publishes: there must be something to lose.
        let publishes = ROLES[dice.below(2) as usize];
        let others: Vec<&'static str> = ROLES.into_iter().filter(|role| *role != publishes).collect();
        let other = others[dice.below(others.len() as u64) as usize];
        let workers = [publishes, other].map(|role| program.work(dir, role, dice.roll() >> 8));
        let workers: Vec<_> = workers.into_iter().collect::<anyhow::Result<_>>()?;
        // Not a synchronisation: the random moment of the cut.
        std::thread::sleep(Duration::from_micros(dice.below(DELAY_MAX.as_micros() as u64)));
        let above = dir.parent().context("the disk's directory")?;
        fs::write(above.join(marker_name(number)), vec![1; MARKER_BYTES])?;
        for worker in &workers {
            add_newest(&mut self.acknowledged, worker.published());
        }
        let mut clone = Command::new("cp");
        process::run(clone.arg("--reflink=always").arg(disk).arg(cut), COMMAND_LIMIT)?;
        self.cuts += 1;
        for worker in workers {
            let (was_busy, _) = worker.kill()?;
            self.busy += u32::from(was_busy);
        }
        Ok(())
    }
}
