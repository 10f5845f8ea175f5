//! `lvsadm -R --atomic`, with a dataplane that has no packet path.

use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use lvs_api::Address;
use lvs_core::api::{Call, Done, Failure, FailureCode, LocalPool, Permissive};
use lvs_core::{Control, Instant, Options};
use lvs_process::server::{Handle, Handler, Permissions, Server, Sink};
use serde_json::Value;

/// A [`Control`] without a packet path, and the calls that it has received.
struct Half {
    control: Mutex<Control>,
    calls: Mutex<Vec<Call>>,
}

struct Shared(Arc<Half>);

impl Handler for Shared {
    fn name(&self) -> String {
        "control half".into()
    }

    fn table_size(&self) -> u32 {
        4096
    }

    fn call(&self, call: Call, _: &mut Sink<'_>) -> Result<Value, Failure> {
        self.0
            .calls
            .lock()
            .expect("no thread panicked with the lock")
            .push(call.clone());
        let Call::Apply { changes } = call else {
            return Err(Failure::new(FailureCode::Unsupported, "apply only"));
        };
        let mut control = self
            .0
            .control
            .lock()
            .expect("no thread panicked with the lock");
        control
            .apply(&changes, &Permissive, Instant::ZERO)
            .map_err(|refused| Failure {
                change: Some(refused.change),
                ..refused.failure
            })?;
        let done = Done {
            warnings: vec!["eth9 is down".into()],
        };
        Ok(serde_json::to_value(done).expect("the value can be written as JSON"))
    }
}

struct Bed {
    half: Arc<Half>,
    address: Address,
    _server: Handle,
}

impl Bed {
    fn new(name: &str) -> Self {
        let mut control = Control::new(Options {
            max_connections: 16,
            ..Options::default()
        });
        let pool = LocalPool {
            addresses: vec!["10.0.0.2".parse().expect("the address is valid")],
            hairpin: false,
        };
        control
            .apply(&[Call::LocalSet(pool)], &Permissive, Instant::ZERO)
            .expect("the local address can be added");
        let half = Arc::new(Half {
            control: Mutex::new(control),
            calls: Mutex::default(),
        });
        let address = Address::new(format!("@lvs-test-atomic-{name}-{}", std::process::id()));
        let server = Server::bind(&address, Permissions::default())
            .expect("the socket is not in use")
            .serve(Arc::new(Shared(half.clone())))
            .expect("the thread can be started");
        Self {
            half,
            address,
            _server: server,
        }
    }

    /// Runs the program; returns its standard error and exit status.
    fn restore(&self, rules: &str) -> (String, i32) {
        let mut child = Command::new(env!("CARGO_BIN_EXE_lvsadm"))
            .env("LVS_SOCKET", self.address.to_string())
            .args(["-R", "--atomic"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("lvsadm starts");
        let mut input = child.stdin.take().expect("the standard input is a pipe");
        input
            .write_all(rules.as_bytes())
            .expect("lvsadm reads the rules");
        drop(input);
        let output = child.wait_with_output().expect("lvsadm ends");
        let errors = String::from_utf8_lossy(&output.stderr);
        // Errors begin with the path of the program.
        let errors = errors.replace(concat!(env!("CARGO_BIN_EXE_lvsadm"), ": "), "");
        (
            errors,
            output.status.code().expect("no signal ended the program"),
        )
    }

    fn services(&self) -> usize {
        self.half
            .control
            .lock()
            .expect("no thread panicked with the lock")
            .services()
            .count()
    }

    fn calls(&self) -> usize {
        self.half
            .calls
            .lock()
            .expect("no thread panicked with the lock")
            .len()
    }
}

#[test]
fn atomic_restore_accepts_full_nat_if_dataplane_has_local_addresses() {
    let bed = Bed::new("fullnat");
    let (errors, status) = bed.restore(
        "-C\n-A -t 192.0.2.1:80 -s rr\n-a -t 192.0.2.1:80 -r 10.0.0.11:80 --fullnat -w 2\n",
    );
    assert_eq!((errors.as_str(), status), ("warning: eth9 is down\n", 0));
    assert_eq!((bed.services(), bed.calls()), (1, 1));
}

#[test]
fn refused_atomic_restore_names_line_and_changes_nothing() {
    let bed = Bed::new("refused");
    let (_, status) = bed.restore("-A -t 192.0.2.1:80 -s rr\n");
    assert_eq!((status, bed.calls()), (0, 1));
    for (rules, expected) in [
        (
            "# rules\n-C\n-A -t 192.0.2.2:80\n\n-A -t 192.0.2.2:80\n",
            "line 5: Service already exists; nothing was changed\n",
        ),
        (
            "-C\n-A -t 192.0.2.2:80 -s nosuch\n",
            "line 2: Scheduler or persistence engine not found; nothing was changed\n",
        ),
        (
            "-A -u 192.0.2.2:53 -o\n-a -u 192.0.2.2:53 -r 10.0.0.9 --fullnat\n",
            "line 2: full NAT",
        ),
        (
            "-A -t [2001:db8::1]:80\n-a -t [2001:db8::1]:80 -r [2001:db8::9]:80 --fullnat\n",
            "line 2: full NAT needs a local address",
        ),
    ] {
        let (errors, status) = bed.restore(rules);
        assert!(
            errors.contains(expected) && errors.ends_with("; nothing was changed\n"),
            "{rules:?}: {errors}"
        );
        assert_eq!((status, bed.services()), (255, 1), "{rules}");
    }
}

#[test]
fn invalid_atomic_line_is_refused_without_call_to_dataplane() {
    let bed = Bed::new("wrong");
    for (rules, expected) in [
        ("-C\n-A -t 192.0.2.2:80 --wrong\n", "line 2: "),
        (
            "-C\n\n-L\n",
            "line 3: `-R --atomic' accepts only commands that change the configuration",
        ),
    ] {
        let (errors, status) = bed.restore(rules);
        assert!(
            errors.starts_with(expected) && errors.ends_with("; nothing was changed\n"),
            "{rules:?}: {errors}"
        );
        assert_eq!((status, errors.lines().count()), (255, 1), "{rules:?}");
    }
    assert_eq!(bed.calls(), 0);
}
