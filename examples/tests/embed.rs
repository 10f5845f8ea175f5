//! The `embed` example, run as a user would run it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;

/// Ends the program, also if the test fails.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server that sends its name and then closes the connection.
fn server(name: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = stream.and_then(|mut stream| stream.write_all(name.as_bytes()));
        }
    });
    addr.to_string()
}

#[test]
fn embed_relays_connections_by_weight() {
    let (a, b) = (server("a"), server("b"));
    let mut child = Command::new(env!("CARGO_BIN_EXE_embed"))
        .args(["127.0.0.1:0", "wrr", &a, &format!("{b}=3")])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let _running = Running(child);
    let addr = line
        .trim()
        .strip_prefix("listening on ")
        .expect("the first line has the listening address");
    let answers: String = (0..40)
        .map(|_| {
            let mut text = String::new();
            TcpStream::connect(addr)
                .unwrap()
                .read_to_string(&mut text)
                .unwrap();
            text
        })
        .collect();
    let count = |name| answers.chars().filter(|&answer| answer == name).count();
    assert_eq!((count('a'), count('b')), (10, 30), "{answers}");
}

#[test]
fn embed_refuses_invalid_arguments_with_the_reason() {
    let run = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_embed"))
            .args(args)
            .output()
            .unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(run(&[]).contains("usage: embed"));
    assert!(run(&["127.0.0.1:0", "best", "127.0.0.1:1"]).contains("no scheduler best"));
    assert!(run(&["127.0.0.1:0", "rr", "nowhere"]).contains("nowhere is not an address"));
    assert!(run(&["127.0.0.1:0", "rr", "127.0.0.1:1=-1"]).contains("below 0"));
}
