//! Which change on the host makes a refused setup step possible.
//!
//! What stays true: every refusal of isolation comes with something an operator can do.

use covey_wire::setup::SetupPlace;

use super::StartError;

/// Turns a reported failure into the error that callers see.
pub(super) fn explain(place: SetupPlace, what: String, errno: i32) -> StartError {
    let remedy = match (place, errno) {
        (SetupPlace::Clone, libc::ENOSPC | libc::EUSERS) => {
            "raise the number of user namespaces: sysctl user.max_user_namespaces=15000"
        }
        (SetupPlace::Clone, libc::EINVAL) => {
            "use a kernel built with user, pid, network, ipc, uts and cgroup namespaces"
        }
        (SetupPlace::Clone, _) => {
            "allow user namespaces: sysctl kernel.unprivileged_userns_clone=1 (Debian), \
             sysctl kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), or run the runner as root; \
             inside a container start that container with a seccomp profile that allows namespaces"
        }
        (SetupPlace::IdMap, _) => {
            "run the runner as root or as an ordinary user, and not in a user namespace that maps one id only"
        }
        (SetupPlace::Proc, _) => {
            "the runner stands in a container whose /proc is partly masked, so no fresh one may be mounted: start that \
             container with unmasked paths (docker: --security-opt systempaths=unconfined) or run the runner on the host"
        }
        (SetupPlace::Mount, libc::EPERM | libc::EACCES) => {
            "a security module refuses mounts in user namespaces: on Ubuntu sysctl \
             kernel.apparmor_restrict_unprivileged_userns=0 or an AppArmor profile with `userns,` for the runner"
        }
        (SetupPlace::Mount, libc::ENOSYS | libc::EINVAL) => "use Linux 5.12 or newer",
        (SetupPlace::Confine, _) => "use a kernel built with seccomp filters",
        (SetupPlace::Home, _) => {
            return StartError::Failed(format!(
                "{what}; the working copy must be a directory that the runner's user can reach and that belongs to the \
                 uid the sandbox runs as"
            ));
        }
        (SetupPlace::Mount | SetupPlace::Cgroup | SetupPlace::Other, _) => return StartError::Failed(what),
    };
    StartError::Isolation { what, remedy: remedy.to_owned() }
}
