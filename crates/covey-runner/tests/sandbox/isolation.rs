//! What an agent finds inside: its home, the host's programs, and nothing else.

use crate::room::{Room, text};

const CANARY: &str = "covey-canary-5d41402abc4b2a76";

#[test]
fn no_process_inside_shows_anything_of_the_runner() {
    // In memory and in an open file of this process, and beside the home on disk.
    let canary = CANARY.to_owned();
    let room = Room::new();
    std::fs::write(room.root.path().join("secret"), &canary).unwrap();
    let open = std::fs::File::open(room.root.path().join("secret")).unwrap();
    let live = room.start();
    // The pattern is put together inside, so that the search does not find itself.
    let search = "p=covey-canary; p=$p-5d41402abc4b2a76; \
                  for f in /proc/[0-9]*/environ /proc/[0-9]*/cmdline /proc/[0-9]*/mounts /proc/[0-9]*/maps /proc/[0-9]*/task/*/comm; do \
                    { tr '\\0' '\\n' <$f; } 2>/dev/null | grep -v 'p=' | grep -l \"$p\" && echo FOUND $f; done; \
                  grep -rlsF \"$p\" / --exclude-dir=usr --exclude-dir=proc --exclude-dir=sys --exclude-dir=dev; echo searched";
    assert_eq!(live.output(search), "searched\n");
    // Only the three standard streams, none of them a socket or a file of the host.
    for target in live.output("for fd in /proc/$$/fd/*; do readlink $fd; done; true").lines() {
        let is_own =
            target == "/dev/null" || target.starts_with("pipe:") || target.starts_with("/run/covey/");
        assert!(is_own, "{target}");
    }
    drop(open);
}

#[test]
fn the_daemon_hides_its_memory_program_and_descriptors_from_its_own_uid() {
    let room = Room::new();
    let live = room.start();
    for path in ["exe", "cwd", "root", "fd", "environ", "mem", "maps"] {
        live.failure(&format!("cat /proc/1/{path} || ls /proc/1/{path}/ || readlink /proc/1/{path}"));
    }
    live.failure("readlink /proc/1/exe");
    live.failure("ls -l /proc/1/fd");
    assert_eq!(live.output("tr '\\0' ' ' </proc/1/cmdline"), "sandboxd ");
    // Signals from inside do not reach pid 1; it is still there afterwards.
    live.bash("kill -9 1; kill -STOP 1; kill -TERM 1");
    live.ping();
}

#[test]
fn there_is_no_capability_and_no_way_to_get_one() {
    let room = Room::new();
    let live = room.start();
    let status = live.output("grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status");
    for line in status.lines() {
        let value = line.split_whitespace().nth(1).unwrap();
        let expected = match line.split(':').next().unwrap() {
            "NoNewPrivs" => "1",
            "Seccomp" => "2",
            _ => "0000000000000000",
        };
        assert_eq!(value, expected, "{line}");
    }
    assert!(live.output("find / -xdev -perm -4000 2>/dev/null | wc -l; findmnt -n -o OPTIONS /usr 2>/dev/null || grep ' /usr ' /proc/mounts").contains("nosuid"));
    live.failure("echo x >/proc/self/uid_map");
}

#[test]
fn namespaces_mounts_and_tracing_the_daemon_are_refused() {
    let room = Room::new();
    let live = room.start();
    for command in [
        "unshare -U true",
        "unshare -r true",
        "unshare -m true",
        "unshare -n true",
        "unshare -p true",
        "nsenter -t 1 -m true",
        "mount -t tmpfs x /tmp",
        "mount --bind /tmp /mnt",
        "umount /proc",
        "chroot /tmp true",
        "mknod /tmp/d b 8 0",
        "hostname other",
        "swapon /dev/zero",
        "dmesg",
        "keyctl show || [ -x /usr/bin/keyctl ] && false",
        "date -s 2000-01-01",
    ] {
        live.failure(command);
    }
    let traced = "import ctypes; libc = ctypes.CDLL(None, use_errno=True); \
                  r = libc.ptrace(16, 1, 0, 0); print(r); exit(0 if r == -1 else 9)";
    if live.bash("python3 --version").exit_code == Some(0) {
        live.output(&format!("python3 -c '{traced}'"));
        // clone3 is answered with "not implemented" (38), clone with a namespace flag with "not permitted" (1).
        let call = |number: &str, argument: &str| {
            format!(
                "python3 -c 'import ctypes; l = ctypes.CDLL(None, use_errno=True); r = l.syscall({number}, {argument}); \
                 print(ctypes.get_errno() if r == -1 else 0)'"
            )
        };
        if cfg!(target_arch = "x86_64") {
            assert_eq!(live.output(&call("435", "0, 0")), "38\n");
            assert_eq!(live.output(&call("56", "0x10000000, 0, 0, 0, 0")), "1\n");
            assert_eq!(live.output(&call("425", "1, 0")), "1\n", "io_uring_setup");
            assert_eq!(live.output(&call("321", "0, 0, 0")), "1\n", "bpf");
            assert_eq!(live.output(&call("323", "0")), "1\n", "userfaultfd");
            assert_eq!(live.output(&call("41", "40, 1, 0")), "1\n", "vsock");
            assert_eq!(live.output(&call("41", "17, 3, 0")), "1\n", "packet");
            assert_eq!(live.output(&call("0x40000000 + 165", "0, 0, 0, 0, 0")), "1\n", "x32 mount");
        }
    }
}

#[test]
fn the_network_has_nothing_but_its_own_loopback() {
    let room = Room::new();
    let host = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = host.local_addr().unwrap().port();
    let live = room.start();
    assert_eq!(live.output("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '"), "lo\n");
    for target in
        [format!("127.0.0.1/{port}"), "169.254.169.254/80".into(), "1.1.1.1/53".into(), "10.0.0.1/80".into()]
    {
        live.failure(&format!("timeout 5 bash -c 'echo >/dev/tcp/{target}'"));
    }
    live.failure("timeout 5 bash -c 'echo >/dev/udp/169.254.169.254/53'");
    live.failure("timeout 5 bash -c 'echo >/dev/tcp/2001:4860:4860::8888/53'");
    live.failure("getent hosts example.com");
    // Abstract sockets of the host live in its network namespace; none is visible.
    let name = format!("\0covey-test-{port}");
    let address = rustix::net::SocketAddrUnix::new_abstract_name(&name.as_bytes()[1..]).unwrap();
    let abstract_socket =
        rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM, None).unwrap();
    rustix::net::bind(&abstract_socket, &address).unwrap();
    live.failure(&format!("grep -a covey-test-{port} /proc/net/unix"));
}

#[test]
fn another_home_and_the_hosts_files_are_not_there() {
    let other = Room::new();
    std::fs::write(other.home_dir().join("theirs"), "x").unwrap();
    let room = Room::new();
    let live = room.start();
    live.failure(&format!("ls {}", other.home_dir().display()));
    live.failure(&format!("ls {}", room.root.path().display()));
    assert_eq!(live.output("ls /home"), "agent\n");
    live.failure("cat /etc/shadow");
    live.failure("ls /root");
    let roots = live.output("ls -A / | tr '\\n' ' '");
    assert!(!roots.contains("work") && !roots.contains("boot"), "{roots}");
    // Neither by walking up nor through a process's root.
    assert_eq!(live.output("cd ../../../../../..; pwd; ls /proc/self/root/home"), "/\nagent\n");
}

#[test]
fn what_is_not_the_agents_is_read_only() {
    let room = Room::new();
    let live = room.start();
    for path in [
        "/x",
        "/usr/x",
        "/etc/x",
        "/etc/passwd",
        "/bin/x",
        "/lib/x",
        "/proc/sys/kernel/hostname",
        "/proc/sysrq-trigger",
        "/proc/sys/kernel/core_pattern",
        "/sys/x",
        "/dev/x",
        "/home/x",
        "/var/x",
    ] {
        live.failure(&format!("echo x >{path}"));
    }
    for path in ["/home/agent/x", "/tmp/x", "/outputs/x", "/dev/shm/x", "/dev/null"] {
        live.output(&format!("echo x >{path}"));
    }
    live.failure("cp /bin/true /outputs/t && chmod +x /outputs/t && /outputs/t");
    live.failure("ls /sys/fs/cgroup/* ");
    for path in ["kcore", "kmsg", "cmdline", "partitions", "keys"] {
        assert_eq!(live.bash(&format!("head -c 1 /proc/{path} | wc -c")).exit_code, Some(0));
        assert!(
            text(&live.bash(&format!("head -c 1 /proc/{path} 2>/dev/null | wc -c"))).starts_with('0'),
            "{path}"
        );
    }
    live.failure("ulimit -Hn 1000000");
}

#[test]
fn git_in_the_home_works_without_configuration() {
    let room = Room::new();
    let live = room.start();
    if live.bash("git --version").exit_code == Some(0) {
        live.output("git init -q r && cd r && echo x >f && git add f && git -c user.name=a -c user.email=a@b commit -qm m");
        assert_eq!(live.output("git status --porcelain; git log --oneline | wc -l"), "1\n");
    }
}
