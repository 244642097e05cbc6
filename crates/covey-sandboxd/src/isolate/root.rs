//! The root file system: a tmpfs with the host's `/usr` read-only, generated `/etc`, fresh `/proc`, small `/dev`.
//!
//! What stays true: every host path is opened before anything is mounted over, without following a final
//! symbolic link, and used through its descriptor only, so nobody can swap it during the setup; devices are
//! checked to be the devices they are named for. Host paths stay visible inside in one place only: the fourth
//! field of `/proc/*/mountinfo` (docs/threats.md). What does not belong here: privileges.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use covey_wire::setup::{SetupPlace, SetupSpec};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::process::{Gid, Uid};

use crate::setup::{SetupError, Tried};
use crate::stage0::AGENT_ID;
use crate::sys::{self, MountAttributes};

/// Bytes and files that `/tmp` may hold. Twice as much would let one sandbox take that much more of the host's
/// memory where no cgroup counts it.
const TMP_OPTIONS: &std::ffi::CStr = c"size=2g,nr_inodes=1000000,mode=1777";
const SHM_OPTIONS: &std::ffi::CStr = c"size=512m,nr_inodes=100000,mode=1777";
const RUN_OPTIONS: &std::ffi::CStr = c"size=16m,nr_inodes=10000,mode=0755";
const ROOT_OPTIONS: &std::ffi::CStr = c"size=16m,nr_inodes=10000,mode=0755";

/// Top-level names that are links into `/usr` on merged hosts and directories elsewhere.
const USR_TWINS: [&str; 6] = ["bin", "sbin", "lib", "lib32", "lib64", "libx32"];
/// Read-only from the host's `/etc` where they exist: nothing secret, and tools break without them.
const ETC_FROM_HOST: [&str; 9] = [
    "alternatives",
    "ca-certificates/extracted",
    "ld.so.cache",
    "localtime",
    "mime.types",
    "pki/ca-trust/extracted",
    "pki/tls/certs",
    "services",
    "ssl/certs",
];
const DEVICES: [(&str, u32, u32); 6] =
    [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)];
/// Files of a fresh `/proc` that tell about the host or its hardware.
const PROC_MASKED_FILES: [&str; 16] = [
    "cmdline",
    "config.gz",
    "diskstats",
    "iomem",
    "ioports",
    "kallsyms",
    "kcore",
    "key-users",
    "keys",
    "kmsg",
    "latency_stats",
    "modules",
    "partitions",
    "sched_debug",
    "swaps",
    "timer_list",
];
const PROC_MASKED_DIRS: [&str; 4] = ["acpi", "bus", "scsi", "driver"];
const PROC_READ_ONLY: [&str; 2] = ["sys", "sysrq-trigger"];

const GENERATED: [(&str, &str); 7] = [
    (
        "etc/passwd",
        "root:x:0:0:root:/root:/usr/sbin/nologin\n\
         agent:x:1000:1000:agent:/home/agent:/bin/bash\n\
         nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    ),
    ("etc/group", "root:x:0:\ntty:x:5:\nagent:x:1000:\nnogroup:x:65534:\n"),
    ("etc/hosts", "127.0.0.1 localhost covey\n::1 localhost covey\n"),
    ("etc/hostname", "covey\n"),
    (
        "etc/nsswitch.conf",
        "passwd: files\ngroup: files\nshadow: files\nhosts: files\nservices: files\nprotocols: files\n",
    ),
    // No resolver: the network namespace is empty, and a name lookup shall fail at once.
    ("etc/resolv.conf", ""),
    // A restored home has other inode numbers and change times than its git index remembers. With these two,
    // `git status` compares only what a restore keeps (size and modification time) and reads no file.
    ("etc/gitconfig", "[core]\n\tcheckStat = minimal\n\ttrustctime = false\n[safe]\n\tdirectory = *\n"),
];

/// A host path, opened before the host disappears.
struct Source {
    fd: OwnedFd,
    is_dir: bool,
}

impl Source {
    fn open(path: &Path) -> io::Result<Self> {
        let fd = rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode);
        if kind.is_symlink() {
            return Err(io::Error::other("is a symbolic link"));
        }
        Ok(Self { is_dir: kind.is_dir(), fd })
    }

    /// As [`Self::open`], after following links: for names that distributions ship as links.
    fn open_resolved(path: &Path) -> io::Result<Self> {
        Self::open(&fs::canonicalize(path)?)
    }

    fn bind(&self, target: &Path, attributes: MountAttributes) -> Result<(), SetupError> {
        let what = || format!("mount {}", target.display());
        let source = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        rustix::mount::mount_bind_recursive(source, target).tried(SetupPlace::Mount, what())?;
        let path = CString::new(target.as_os_str().as_bytes()).tried(SetupPlace::Mount, what())?;
        sys::set_mount_attributes(&path, attributes, true)
            .tried(SetupPlace::Mount, format!("protect {}", target.display()))
    }
}

/// Everything of the host that the new root is made from.
struct Host {
    usr: Source,
    twins: Vec<(&'static str, Twin)>,
    etc: Vec<(&'static str, Source)>,
    devices: Vec<(&'static str, Source)>,
    home: Source,
    outputs: Source,
}

enum Twin {
    Link(PathBuf),
    Dir(Source),
}

impl Host {
    fn open(spec: &SetupSpec) -> Result<Self, SetupError> {
        let usr = Source::open_resolved(Path::new("/usr")).tried(SetupPlace::Mount, "open /usr")?;
        let mut twins = Vec::new();
        for name in USR_TWINS {
            let path = Path::new("/").join(name);
            let twin = match fs::read_link(&path) {
                Ok(target) => Twin::Link(target),
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                // Not a link.
                Err(_) => Twin::Dir(
                    Source::open(&path).tried(SetupPlace::Mount, format!("open {}", path.display()))?,
                ),
            };
            twins.push((name, twin));
        }
        let etc = ETC_FROM_HOST
            .into_iter()
            .filter_map(|name| Source::open_resolved(&Path::new("/etc").join(name)).ok().map(|s| (name, s)))
            .collect();
        let mut devices = Vec::new();
        for (name, major, minor) in DEVICES {
            let what = format!("open /dev/{name}");
            let source = Source::open(&Path::new("/dev").join(name)).tried(SetupPlace::Mount, &what)?;
            let device = rustix::fs::fstat(&source.fd).tried(SetupPlace::Mount, &what)?;
            let is_right = FileType::from_raw_mode(device.st_mode).is_char_device()
                && (rustix::fs::major(device.st_rdev), rustix::fs::minor(device.st_rdev)) == (major, minor);
            if !is_right {
                return Err(io::Error::other("is not the device it is named for"))
                    .tried(SetupPlace::Mount, what);
            }
            devices.push((name, source));
        }
        let directory =
            |path: &Path| {
                Source::open(path)
                    .and_then(|source| {
                        if source.is_dir { Ok(source) } else { Err(io::ErrorKind::NotADirectory.into()) }
                    })
                    .tried(SetupPlace::Home, format!("open {}", path.display()))
            };
        Ok(Self {
            usr,
            twins,
            etc,
            devices,
            home: directory(&spec.home_dir)?,
            outputs: directory(&spec.outputs_dir)?,
        })
    }
}

/// Builds the root and makes it the only one. Ends with the agent's ids but all capabilities.
pub(crate) fn build(spec: &SetupSpec) -> Result<(), SetupError> {
    let mount = SetupPlace::Mount;
    sys::unshare_cgroup().tried(SetupPlace::Clone, "make a cgroup namespace")?;
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .tried(mount, "make the mounts private")?;
    // With the ids that the runner has: the working copy may lie below a directory that is closed to the agent's.
    let host = Host::open(spec)?;
    become_agent(spec)?;

    // Any existing directory serves: it is covered in this mount namespace only, and left by the pivot.
    let base = ["/tmp", "/mnt", "/run", "/var"].into_iter().find(|dir| Path::new(dir).is_dir());
    let base =
        base.ok_or(io::Error::from(io::ErrorKind::NotFound)).tried(mount, "find a directory to mount on")?;
    rustix::mount::mount("covey", base, "tmpfs", MountFlags::NOSUID, ROOT_OPTIONS)
        .tried(mount, format!("mount a tmpfs on {base}"))?;
    rustix::process::chdir(base).tried(mount, format!("enter {base}"))?;

    directories()?;
    host.usr.bind(Path::new("usr"), MountAttributes::READ_ONLY)?;
    for (name, twin) in &host.twins {
        match twin {
            Twin::Link(target) => symlink(target, name).tried(mount, format!("link /{name}"))?,
            Twin::Dir(source) => {
                fs::create_dir(name).tried(mount, format!("make /{name}"))?;
                source.bind(Path::new(name), MountAttributes::READ_ONLY)?;
            }
        }
    }
    etc(&host)?;
    proc(&host)?;
    dev(&host)?;
    tmpfs("tmp", TMP_OPTIONS)?;
    tmpfs("run", RUN_OPTIONS)?;
    fs::create_dir("run/covey").tried(mount, "make /run/covey")?;
    fs::set_permissions("run/covey", fs::Permissions::from_mode(0o700)).tried(mount, "close /run/covey")?;
    host.home.bind(Path::new("home/agent"), MountAttributes::WRITABLE)?;
    host.outputs.bind(Path::new("outputs"), MountAttributes::DATA)?;
    drop(host);
    pivot()?;
    rustix::system::sethostname(b"covey").tried(mount, "set the host name")?;
    // An empty network namespace has only this interface; development servers want it.
    sys::raise_loopback().tried(mount, "bring the loopback interface up")
}

fn become_agent(spec: &SetupSpec) -> Result<(), SetupError> {
    let (uid, gid) = (Uid::from_raw(AGENT_ID), Gid::from_raw(AGENT_ID));
    if spec.is_privileged {
        rustix::thread::set_thread_groups(&[]).tried(SetupPlace::IdMap, "drop the supplementary groups")?;
    }
    rustix::thread::set_keep_capabilities(true).tried(SetupPlace::IdMap, "keep capabilities")?;
    rustix::thread::set_thread_res_gid(gid, gid, gid).tried(SetupPlace::IdMap, "become gid 1000")?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).tried(SetupPlace::IdMap, "become uid 1000")
}

fn directories() -> Result<(), SetupError> {
    const DIRS: [&str; 17] = [
        "usr",
        "etc",
        "proc",
        "dev",
        "dev/pts",
        "dev/shm",
        "tmp",
        "run",
        "var",
        "var/empty",
        "home",
        "home/agent",
        "outputs",
        "mnt",
        "opt",
        "srv",
        "sys",
    ];
    for dir in DIRS {
        fs::create_dir(dir)
            .and_then(|()| fs::set_permissions(dir, fs::Permissions::from_mode(0o755)))
            .tried(SetupPlace::Mount, format!("make /{dir}"))?;
    }
    symlink("/tmp", "var/tmp").and_then(|()| symlink("/run", "var/run")).tried(SetupPlace::Mount, "link /var")
}

fn etc(host: &Host) -> Result<(), SetupError> {
    for (path, text) in GENERATED {
        fs::write(path, text)
            .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o644)))
            .tried(SetupPlace::Mount, format!("write /{path}"))?;
    }
    symlink("/proc/self/mounts", "etc/mtab").tried(SetupPlace::Mount, "link /etc/mtab")?;
    for (name, source) in &host.etc {
        let target = Path::new("etc").join(name);
        let made = match target.parent() {
            Some(parent) => fs::create_dir_all(parent),
            None => Ok(()),
        };
        made.and_then(|()| if source.is_dir { fs::create_dir(&target) } else { fs::write(&target, "") })
            .tried(SetupPlace::Mount, format!("make /{}", target.display()))?;
        source.bind(&target, MountAttributes::READ_ONLY)?;
    }
    Ok(())
}

fn proc(host: &Host) -> Result<(), SetupError> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    rustix::mount::mount("proc", "proc", "proc", flags, None)
        .tried(SetupPlace::Proc, "mount a fresh /proc")?;
    let null = host.devices.iter().find(|(name, _)| *name == "null").map(|(_, source)| source);
    let null =
        null.ok_or(io::Error::from(io::ErrorKind::NotFound)).tried(SetupPlace::Proc, "find /dev/null")?;
    for name in PROC_MASKED_FILES {
        let target = Path::new("proc").join(name);
        if target.exists() {
            null.bind(&target, MountAttributes::DEVICE)?;
        }
    }
    let empty = Source::open(Path::new("var/empty")).tried(SetupPlace::Proc, "open /var/empty")?;
    for name in PROC_MASKED_DIRS {
        let target = Path::new("proc").join(name);
        if target.exists() {
            empty.bind(&target, MountAttributes::READ_ONLY)?;
        }
    }
    for name in PROC_READ_ONLY {
        let target = Path::new("proc").join(name);
        if target.exists() {
            let source = Source::open(&target).tried(SetupPlace::Proc, format!("open /proc/{name}"))?;
            source.bind(&target, MountAttributes::READ_ONLY)?;
        }
    }
    Ok(())
}

fn dev(host: &Host) -> Result<(), SetupError> {
    let place = SetupPlace::Mount;
    for (name, source) in &host.devices {
        let target = Path::new("dev").join(name);
        fs::write(&target, "").tried(place, format!("make /dev/{name}"))?;
        source.bind(&target, MountAttributes::DEVICE)?;
    }
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
    rustix::mount::mount("devpts", "dev/pts", "devpts", flags, Some(c"newinstance,ptmxmode=0666,mode=0600"))
        .tried(place, "mount /dev/pts")?;
    tmpfs("dev/shm", SHM_OPTIONS)?;
    for (link, target) in [
        ("dev/ptmx", "pts/ptmx"),
        ("dev/fd", "/proc/self/fd"),
        ("dev/stdin", "/proc/self/fd/0"),
        ("dev/stdout", "/proc/self/fd/1"),
        ("dev/stderr", "/proc/self/fd/2"),
    ] {
        symlink(target, link).tried(place, format!("link /{link}"))?;
    }
    Ok(())
}

fn tmpfs(target: &str, options: &std::ffi::CStr) -> Result<(), SetupError> {
    rustix::mount::mount("covey", target, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, options)
        .tried(SetupPlace::Mount, format!("mount a tmpfs on /{target}"))
}

fn pivot() -> Result<(), SetupError> {
    let place = SetupPlace::Mount;
    // The old root ends up on top of the new one at the same place, and is detached at once: no path leads back.
    rustix::process::pivot_root(".", ".").tried(place, "pivot the root")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).tried(place, "detach the host's root")?;
    rustix::process::chdir("/").tried(place, "enter the new root")?;
    sys::set_mount_attributes(c"/", MountAttributes::READ_ONLY_ROOT, false)
        .tried(place, "make the root read-only")?;
    // The id map is what makes the home the agent's; a wrong `host_uid` must fail here and not at the first write.
    let home = fs::metadata("/home/agent").tried(SetupPlace::Home, "look at /home/agent")?;
    if home.uid() != AGENT_ID {
        return Err(io::Error::other("it does not belong to the uid that the sandbox runs as"))
            .tried(SetupPlace::Home, "use the working copy");
    }
    Ok(())
}
