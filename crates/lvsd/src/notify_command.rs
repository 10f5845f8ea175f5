//! Runs the notification program once for each event, with the event as JSON on its standard input.
//! One process runs at a time, and lvsd kills it after a time limit. No other part of lvsd waits
//! for it, except at the exit: if the program is too slow, events are lost, and the log reports
//! their number.

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use lvs_api::daemon::Event;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::sync::{broadcast, oneshot, watch};

/// Settings of the notification program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The program and its arguments; empty if no program is configured.
    pub words: Vec<String>,
    /// Time limit of the program.
    pub limit: Duration,
    /// User and group of the program, if lvsd runs as root.
    pub user: Option<(u32, u32)>,
}

impl Default for Notice {
    fn default() -> Self {
        Self {
            words: Vec::new(),
            limit: Duration::from_secs(10),
            user: None,
        }
    }
}

/// Returns the ids of a user and its group; `name` may be a number. The number of an unknown user
/// is also the id of the group. `None` if no user has the name.
pub fn user(name: &str) -> Option<(u32, u32)> {
    let text = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let found = text.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let [user, _, uid, gid, ..] = fields[..] else {
            return None;
        };
        let ids = (uid.parse().ok()?, gid.parse().ok()?);
        (user == name || uid == name).then_some(ids)
    });
    let number = name.parse().ok();
    found.or_else(|| number.map(|number| (number, number)))
}

/// Runs the program of `notice` for each event until the daemon exits. After `ending` is sent or
/// dropped, only the queued events are handled.
pub async fn serve(
    mut events: broadcast::Receiver<Arc<Event>>,
    notice: watch::Receiver<Notice>,
    mut ending: oneshot::Receiver<()>,
) {
    let mut ends = false;
    loop {
        if ends && events.is_empty() {
            return;
        }
        let event = tokio::select! {
            biased;
            event = events.recv() => event,
            _ = &mut ending, if !ends => {
                ends = true;
                continue;
            }
        };
        let event = match event {
            Ok(event) => event,
            Err(broadcast::error::RecvError::Lagged(lost)) => {
                tracing::warn!("the notify command is too slow: {lost} events were lost");
                continue;
            }
            Err(broadcast::error::RecvError::Closed) => return,
        };
        let notice = notice.borrow().clone();
        if notice.words.is_empty() {
            continue;
        }
        if let Err(why) = run(&notice, &event).await {
            tracing::warn!("the notify command failed for {}: {why}", event.event);
        }
    }
}

async fn run(notice: &Notice, event: &Event) -> Result<(), String> {
    let Some((program, arguments)) = notice.words.split_first() else {
        return Ok(());
    };
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env("LVSD_EVENT", &event.event)
        .env_remove("NOTIFY_SOCKET")
        .env_remove("WATCHDOG_USEC")
        .env_remove("WATCHDOG_PID")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .kill_on_drop(true);
    // The program does not need the privileges of lvsd.
    if let Some((uid, gid)) = notice.user
        && rustix::process::geteuid().is_root()
    {
        command.uid(uid).gid(gid);
    }
    let mut child = command.spawn().map_err(|error| {
        let hint = match error.kind() {
            std::io::ErrorKind::PermissionDenied => {
                "; it runs as `notify_user`, for which lvsd needs CAP_SETUID and CAP_SETGID"
            }
            _ => "",
        };
        format!("cannot start {program}: {error}{hint}")
    })?;
    let mut line = serde_json::to_vec(event).map_err(|error| error.to_string())?;
    line.push(b'\n');
    let input = child.stdin.take();
    let work = async {
        if let Some(mut input) = input {
            // The program need not read its input.
            let _ = input.write_all(&line).await;
        }
        child.wait().await
    };
    match tokio::time::timeout(notice.limit, work).await {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(format!("{program} ended with {status}")),
        Ok(Err(error)) => Err(format!("lvsd cannot wait for {program}: {error}")),
        Err(_) => {
            end_group(child.id());
            Err(format!(
                "{program} took longer than {:?} and was killed",
                notice.limit
            ))
        }
    }
}

/// Kills the process group of a program.
pub(crate) fn end_group(pid: Option<u32>) {
    let pid = pid.and_then(|pid| i32::try_from(pid).ok());
    if let Some(group) = pid.and_then(rustix::process::Pid::from_raw) {
        match rustix::process::kill_process_group(group, rustix::process::Signal::KILL) {
            // The process has exited.
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => tracing::warn!(
                "cannot kill process group {}: {error}; lvsd needs CAP_KILL for this",
                group.as_raw_nonzero()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channels::{About, Events};

    fn notice(script: &str, limit: Duration) -> Notice {
        Notice {
            words: ["/bin/sh", "-c", script].map(str::to_owned).to_vec(),
            limit,
            user: None,
        }
    }

    #[tokio::test]
    async fn events_sent_before_exit_reach_notify_command() {
        let directory = tempfile::tempdir().expect("a temporary directory can be created");
        let file = directory.path().join("events");
        let script = format!("cat >> {}", file.display());
        let (_keep, notice) = watch::channel(notice(&script, Duration::from_secs(300)));
        let mut events = Events::default();
        let (end, ending) = oneshot::channel();
        let served = tokio::spawn(serve(events.listen(), notice, ending));
        for event in ["first", "second"] {
            events.send(event, About::default(), "words");
        }
        drop(end);
        served.await.expect("the task ends without a panic");
        let read = std::fs::read_to_string(&file).expect("the command wrote the file");
        let lines: Vec<&str> = read.lines().collect();
        assert!(lines[0].contains("\"event\":\"first\""), "{read}");
        assert!(lines[1].contains("\"event\":\"second\""), "{read}");
        assert_eq!(lines.len(), 2, "{read}");
    }

    #[tokio::test]
    async fn notify_command_that_exceeds_its_time_limit_is_reported() {
        let mut events = Events::default();
        let mut listener = events.listen();
        events.send("hang", About::default(), "words");
        let event = listener.recv().await.expect("the event was sent");
        let hanging = notice("sleep 1000", Duration::from_millis(20));
        let why = run(&hanging, &event)
            .await
            .expect_err("a command that hangs succeeds");
        assert!(
            why.contains("took longer than 20ms"),
            "no `took longer than 20ms` in {why}"
        );
    }
}
