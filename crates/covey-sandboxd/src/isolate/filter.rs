//! The system call filter: everything is allowed but what only an attacker on the kernel or the host wants.
//!
//! What stays true: applied to the only thread before others exist; refused calls fail with "not permitted" and
//! do not kill, so that programs that probe go on. `clone3` answers "not implemented", because a filter cannot read its
//! arguments and every C library then falls back to `clone`, whose flags it can. What does not belong here: files.

use std::collections::BTreeMap;
use std::io;

use covey_wire::setup::SetupPlace;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

use crate::setup::{SetupError, Tried};

/// On x86-64 the same calls exist a second time under this bit (x32); a filter by number must name both.
#[cfg(target_arch = "x86_64")]
const X32_BIT: i64 = 0x4000_0000;

const REFUSED: &[i64] = &[
    // Mounts, old and new interface.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    // Namespaces.
    libc::SYS_unshare,
    libc::SYS_setns,
    // Large kernel interfaces with a history.
    libc::SYS_bpf,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_fanotify_init,
    libc::SYS_lookup_dcookie,
    // Past path checks.
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    // The machine.
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_vhangup,
    libc::SYS_nfsservctl,
    libc::SYS_move_pages,
    libc::SYS_migrate_pages,
    libc::SYS_kcmp,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_uselib,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ustat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_sysfs,
    #[cfg(target_arch = "x86_64")]
    libc::SYS__sysctl,
];

const NAMESPACE_FLAGS: [i32; 8] = [
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWNS,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWCGROUP,
    // CLONE_NEWTIME shares its bit with the exit signal in `clone`, so only `unshare` and `clone3` can ask for it.
    0,
];

/// Socket families that are local or harmless in an empty network namespace; all others are refused.
const FAMILIES: [i32; 4] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// Installs both filters. Needs `no_new_privs`.
pub(crate) fn apply() -> Result<(), SetupError> {
    let place = SetupPlace::Confine;
    for (rules, errno) in [(refused(), libc::EPERM), (vanished(), libc::ENOSYS)] {
        let program = rules.and_then(|rules| compile(rules, errno)).map_err(io::Error::other);
        let program = program.tried(place, "compile the system call filter")?;
        seccompiler::apply_filter(&program)
            .map_err(io::Error::other)
            .tried(place, "apply the system call filter")?;
    }
    Ok(())
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn compile(rules: Rules, errno: i32) -> Result<BpfProgram, seccompiler::BackendError> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::Errno(errno as u32), arch)?.try_into()
}

fn refused() -> Result<Rules, seccompiler::BackendError> {
    let mut rules: Rules = REFUSED.iter().map(|number| (*number, Vec::new())).collect();
    let argument =
        |index, operator, value| SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, value);
    let mut clone = Vec::new();
    for flag in NAMESPACE_FLAGS.into_iter().filter(|flag| *flag != 0) {
        let flag = flag as u32 as u64;
        clone.push(SeccompRule::new(vec![argument(0, SeccompCmpOp::MaskedEq(flag), flag)?])?);
    }
    rules.insert(libc::SYS_clone, clone);
    let mut families = Vec::new();
    for family in FAMILIES {
        families.push(argument(0, SeccompCmpOp::Ne, family as u64)?);
    }
    rules.insert(libc::SYS_socket, vec![SeccompRule::new(families)?]);
    // Typing into a terminal that others read.
    const TIOCSTI: u64 = 0x5412;
    const TIOCLINUX: u64 = 0x541c;
    rules.insert(
        libc::SYS_ioctl,
        vec![
            SeccompRule::new(vec![argument(1, SeccompCmpOp::Eq, TIOCSTI)?])?,
            SeccompRule::new(vec![argument(1, SeccompCmpOp::Eq, TIOCLINUX)?])?,
        ],
    );
    Ok(with_second_numbers(rules))
}

fn vanished() -> Result<Rules, seccompiler::BackendError> {
    Ok(with_second_numbers([(libc::SYS_clone3, Vec::new())].into()))
}

fn with_second_numbers(rules: Rules) -> Rules {
    #[cfg(target_arch = "x86_64")]
    let rules = rules.into_iter().flat_map(|(n, r)| [(n, r.clone()), (n | X32_BIT, r)]).collect();
    rules
}
