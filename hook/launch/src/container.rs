//! Commands that start another command out of the reach of this hook and collector: in a container,
//! on other nodes, as another user.

use std::{
    ffi::{OsStr, OsString},
    path::Path,
};

use crate::image::behind_env;

/// Where such a command runs its own command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RunsIn {
    /// In a container, with other files and often another environment.
    Container,
    /// Also on other nodes, where no collector was started.
    Nodes,
}

/// Programs, the arguments after which they start a command (none: always), and where they run it.
const STARTERS: [(&str, &[&str], RunsIn); 20] = [
    ("docker", &["run", "exec", "create", "start", "up"], RunsIn::Container),
    ("podman", &["run", "exec", "create", "start", "up"], RunsIn::Container),
    ("nerdctl", &["run", "exec", "create", "start", "up"], RunsIn::Container),
    ("docker-compose", &["run", "exec", "create", "start", "up"], RunsIn::Container),
    ("podman-hpc", &["run", "exec", "shared-run"], RunsIn::Container),
    ("kubectl", &["exec", "run", "debug"], RunsIn::Container),
    ("oc", &["exec", "run", "rsh", "debug"], RunsIn::Container),
    ("ctr", &["run", "exec", "start"], RunsIn::Container),
    ("crictl", &["run", "exec", "start"], RunsIn::Container),
    ("runc", &["run", "exec", "start"], RunsIn::Container),
    ("crun", &["run", "exec", "start"], RunsIn::Container),
    ("singularity", &["run", "exec", "shell", "start"], RunsIn::Container),
    ("apptainer", &["run", "exec", "shell", "start"], RunsIn::Container),
    ("enroot", &["start", "exec"], RunsIn::Container),
    ("udocker", &["run"], RunsIn::Container),
    ("sarus", &["run"], RunsIn::Container),
    ("shifter", &[], RunsIn::Container),
    ("ch-run", &[], RunsIn::Container),
    ("ssh", &[], RunsIn::Nodes),
    ("srun", &[], RunsIn::Nodes),
];

/// Wrappers that run the command after them unchanged.
const WRAPPERS: [&str; 5] = ["sudo", "doas", "nohup", "setsid", "time"];
/// Wrappers that run it as another user.
const USER_CHANGERS: [&str; 2] = ["sudo", "doas"];
/// Their options that have a value.
const VALUED: [&str; 8] = ["-u", "-g", "-h", "-p", "-C", "-D", "-f", "-o"];

/// A command that starts another command elsewhere.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RemoteCommand {
    /// Where to put the launcher instead; a line.
    pub advice: String,
    /// Whether the hook's path would be an error there.
    pub in_container: bool,
}

/// Where this command runs its ranks, if not here.
pub(crate) fn elsewhere(command: &[OsString]) -> Option<RemoteCommand> {
    started_elsewhere(&without_wrappers(command)).or_else(|| as_another_user(command))
}

/// Programs that change the user remove all variables of the dynamic loader.
fn as_another_user(command: &[OsString]) -> Option<RemoteCommand> {
    let inner = behind_env(command, &mut OsString::new());
    let program = Path::new(inner.as_deref().unwrap_or(command).first()?).file_name()?;
    let name = USER_CHANGERS.iter().find(|name| program == **name)?;
    let advice =
        format!("{name} removes LD_PRELOAD: put xpu_timer_launch behind it, `{name} … xpu_timer_launch python …`");
    Some(RemoteCommand { advice, in_container: false })
}

fn started_elsewhere(arguments: &[OsString]) -> Option<RemoteCommand> {
    let program = Path::new(arguments.first()?).file_name()?;
    let (name, starts, reach) = STARTERS.iter().find(|(name, ..)| program == *name)?;
    let verb =
        arguments[1..].iter().filter_map(|argument| argument.to_str()).find(|argument| starts.contains(argument));
    if verb.is_none() && !starts.is_empty() {
        return None;
    }
    let named = [Some(*name), verb].into_iter().flatten().collect::<Vec<_>>().join(" ");
    // Slurm's own containers, and those of its plugin.
    let in_container = *reach == RunsIn::Container
        || arguments.iter().any(|argument| argument.as_encoded_bytes().starts_with(b"--container"));
    let place = if in_container {
        "in a container, which must also have xpu_timer"
    } else {
        "on nodes that have no collector yet"
    };
    let advice = format!(
        "{named} starts its command {place}: put xpu_timer_launch behind it, `{named} … xpu_timer_launch python …`"
    );
    Some(RemoteCommand { advice, in_container })
}

fn without_wrappers(command: &[OsString]) -> Vec<OsString> {
    let mut arguments = command.to_vec();
    loop {
        if let Some(inner) = behind_env(&arguments, &mut OsString::new()) {
            arguments = inner;
            continue;
        }
        let name = arguments.first().and_then(|argument| Path::new(argument).file_name());
        if !name.is_some_and(|name| WRAPPERS.iter().any(|wrapper| name == *wrapper)) {
            return arguments;
        }
        arguments.remove(0);
        while let Some(argument) = arguments.first().filter(|argument| is_option(argument)) {
            let count = if VALUED.iter().any(|option| argument == option) { 2 } else { 1 };
            arguments.drain(..count.min(arguments.len()));
        }
    }
}

fn is_option(argument: &OsStr) -> bool {
    let argument = argument.as_encoded_bytes();
    argument.starts_with(b"-") || argument.contains(&b'=')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Option<RemoteCommand> {
        elsewhere(&text.split(' ').map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn a_container_is_known_by_program_and_verb() {
        for text in [
            "docker run --gpus all image python train.py",
            "/usr/bin/docker --context gpu exec box python train.py",
            "sudo -E -u me docker compose -f x.yml up",
            "env A=b nohup podman run image",
            "singularity exec --nv image.sif python train.py",
            "srun --container-image=image python train.py",
            "enroot start image",
        ] {
            let found = of(text).unwrap_or_else(|| panic!("{text}"));
            assert!(found.in_container && !found.advice.contains('\n'), "{text}: {found:?}");
        }
        assert!(of("docker run image").unwrap().advice.contains("`docker run … xpu_timer_launch python …`"));
    }

    #[test]
    fn other_nodes_get_the_hook_and_the_advice() {
        let found = of("srun -N 2 python train.py").unwrap();
        assert!(!found.in_container && found.advice.contains("`srun … xpu_timer_launch"), "{found:?}");
    }

    #[test]
    fn the_launcher_belongs_behind_a_command_that_changes_the_user() {
        let found = of("env A=b /usr/bin/sudo -E python train.py").unwrap();
        assert!(!found.in_container && found.advice.contains("`sudo … xpu_timer_launch python …`"), "{found:?}");
    }

    #[test]
    fn commands_that_start_nothing_elsewhere_need_no_advice() {
        for text in ["python docker run", "docker ps", "apptainer build x y", "torchrun train.py", "env", "time -p"] {
            assert_eq!(of(text), None, "{text}");
        }
    }
}
