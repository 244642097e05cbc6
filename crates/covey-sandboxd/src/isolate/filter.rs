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
    TargetArch, sock_filter,
};

use crate::setup::{SetupError, Tried};

/// On x86-64 the same calls exist a second time under this bit (x32), which is refused as a whole.
#[cfg(target_arch = "x86_64")]
const X32_BIT: u32 = 0x4000_0000;

/// The kernel's name for this architecture. A call made for another one (32-bit on x86-64) ends the process.
const AUDIT_ARCH: u32 = if cfg!(target_arch = "x86_64") {
    0xc000_003e
} else if cfg!(target_arch = "aarch64") {
    0xc000_00b7
} else {
    0xc000_00f3
};

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

/// CLONE_NEWTIME is not among them: it shares its bit with the exit signal, so only `unshare` and `clone3` can ask for it.
const NAMESPACE_FLAGS: [i32; 7] = [
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWNS,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWCGROUP,
];

/// Socket families that are local or harmless in an empty network namespace; all others are refused.
const FAMILIES: [i32; 4] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// Installs both filters. Needs `no_new_privs`.
pub(crate) fn apply() -> Result<(), SetupError> {
    let place = SetupPlace::Confine;
    let by_argument =
        by_argument().map_err(io::Error::other).tried(place, "compile the system call filter")?;
    for program in [by_number(), by_argument] {
        seccompiler::apply_filter(&program)
            .map_err(io::Error::other)
            .tried(place, "apply the system call filter")?;
    }
    Ok(())
}

/// Calls that are refused whatever their arguments. One comparison each: the kernel runs a new filter for every
/// system call number once when it is installed, so its length is part of each sandbox's start.
fn by_number() -> BpfProgram {
    const LOAD: u16 = 0x20;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    const NUMBER_OFFSET: u32 = 0;
    const ARCH_OFFSET: u32 = 4;
    let instruction = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    let errno = |errno: i32| libc::SECCOMP_RET_ERRNO | errno as u32;
    let mut program = vec![
        instruction(LOAD, 0, 0, ARCH_OFFSET),
        instruction(JUMP_IF_EQUAL, 1, 0, AUDIT_ARCH),
        instruction(RETURN, 0, 0, libc::SECCOMP_RET_KILL_PROCESS),
        instruction(LOAD, 0, 0, NUMBER_OFFSET),
    ];
    // Behind the comparisons stand three returns: allow, refuse, not implemented. Each comparison jumps over those between.
    let mut left = REFUSED.len() + 1;
    #[cfg(target_arch = "x86_64")]
    {
        const JUMP_IF_AT_LEAST: u16 = 0x35;
        program.push(instruction(JUMP_IF_AT_LEAST, (left + 1) as u8, 0, X32_BIT));
    }
    for number in REFUSED {
        left -= 1;
        program.push(instruction(JUMP_IF_EQUAL, (left + 1) as u8, 0, *number as u32));
    }
    program.push(instruction(JUMP_IF_EQUAL, 2, 0, libc::SYS_clone3 as u32));
    program.push(instruction(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW));
    program.push(instruction(RETURN, 0, 0, errno(libc::EPERM)));
    program.push(instruction(RETURN, 0, 0, errno(libc::ENOSYS)));
    program
}

/// Calls that are refused for some arguments.
fn by_argument() -> Result<BpfProgram, seccompiler::BackendError> {
    let argument =
        |index, operator, value| SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, value);
    let mut rules = BTreeMap::new();
    let mut clone = Vec::new();
    for flag in NAMESPACE_FLAGS {
        let flag = u64::from(flag as u32);
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
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let refuse = SeccompAction::Errno(libc::EPERM as u32);
    SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch)?.try_into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel does with the few instructions that [`by_number`] uses.
    fn run(program: &BpfProgram, arch: u32, number: u32) -> u32 {
        let mut register = 0;
        let mut at = 0;
        loop {
            let sock_filter { code, jt, jf, k } = program[at].clone();
            let jump = |is_true: bool| 1 + usize::from(if is_true { jt } else { jf });
            match code {
                0x20 => {
                    register = if k == 4 { arch } else { number };
                    at += 1;
                }
                0x15 => at += jump(register == k),
                0x35 => at += jump(register >= k),
                0x06 => return k,
                other => panic!("instruction {other:#x}"),
            }
        }
    }

    #[test]
    fn the_listed_calls_are_refused_and_all_others_pass() {
        let program = by_number();
        let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
        for number in 0..1000_i64 {
            let expected = match number {
                libc::SYS_clone3 => libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32,
                listed if REFUSED.contains(&listed) => refused,
                _ => libc::SECCOMP_RET_ALLOW,
            };
            assert_eq!(run(&program, AUDIT_ARCH, number as u32), expected, "{number}");
        }
        assert_eq!(run(&program, 0x4000_0003, 0), libc::SECCOMP_RET_KILL_PROCESS);
        #[cfg(target_arch = "x86_64")]
        for number in [0, 1, 165] {
            assert_eq!(run(&program, AUDIT_ARCH, X32_BIT | number), refused);
        }
    }

    #[test]
    fn jumps_fit_into_their_byte() {
        assert!(REFUSED.len() + 2 < usize::from(u8::MAX));
    }
}
