//! `kvferry link`, as two users on two hosts run it: both ends as processes, over loopback.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use kvferry_agent::{Conversation, Key, Listening, Trust};
use serde_json::{Value, json};

/// Long enough for whatever must happen; a test that gets here has failed.
const LONG: Duration = Duration::from_secs(60);

fn kvferry(arguments: &[&str], key: Option<&str>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    command.arg("link").args(arguments).env_remove("KVFERRY_KEY");
    command.envs(key.map(|key| ("KVFERRY_KEY", key)));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// What a process says and how it ends, or the end of the test.
fn ended(mut child: Child) -> (Option<i32>, String, String) {
    let until = Instant::now() + LONG;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > until {
            _ = child.kill();
            panic!("it does not end: {:?}", said(&child.wait_with_output().unwrap()));
        }
        thread::sleep(Duration::from_millis(10));
    }
    said(&child.wait_with_output().unwrap())
}

fn said(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// The end that listens.
struct Listener {
    child: Child,
    output: BufReader<ChildStdout>,
    at: String,
    /// What it has made for this one test.
    key: String,
}

impl Listener {
    fn start(arguments: &[&str]) -> Self {
        Self::with(arguments, &[])
    }

    fn with(arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let transport =
            if arguments.contains(&"--transport") { &[][..] } else { &["--transport", "tcp"] };
        let all = [&["--listen", "127.0.0.1:0"], transport, arguments].concat();
        let mut command = kvferry(&all, None);
        let mut child = command.envs(environment.iter().copied()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = || {
            let mut line = String::new();
            output.read_line(&mut line).unwrap();
            line
        };
        let first = line();
        let at = first.strip_prefix("listens on ").and_then(|rest| rest.split(". On").next());
        let at = at.unwrap_or_else(|| panic!("{first}")).to_owned();
        assert_eq!(line(), "\n");
        let command = line();
        let key = command.trim().strip_prefix("KVFERRY_KEY=").and_then(|it| it.split(' ').next());
        let key = key.unwrap_or_else(|| panic!("{command}")).to_owned();
        Self { child, output, at, key }
    }

    fn test(&self, arguments: &[&str]) -> (Option<i32>, Value, String) {
        let all = [&[&*self.at, "--json", "--seconds", "1", "--transport", "tcp"], arguments];
        let child = kvferry(&all.concat(), Some(&self.key)).spawn().unwrap();
        let (code, output, errors) = ended(child);
        let report = serde_json::from_str(&output);
        (code, report.unwrap_or_else(|_| panic!("{output}{errors}")), errors)
    }

    fn talk(&self, name: &str) -> Conversation {
        let trust = Trust::Key(Key::new(self.key.as_bytes()).unwrap());
        Conversation::open(&self.at, &trust, name, Instant::now() + LONG).unwrap()
    }

    fn ended(mut self) -> (Option<i32>, String, String) {
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).unwrap();
        let (code, _, errors) = ended(self.child);
        (code, rest, errors)
    }
}

/// What is said to be wrong, but for what a busy machine does to rates.
fn wrong(report: &Value) -> Vec<&Value> {
    let findings = report["findings"].as_array().unwrap();
    let timing = ["rate", "loss"].map(Value::from);
    findings.iter().filter(|it| it["wrong"] == true && !timing.contains(&it["what"])).collect()
}

/// Bytes came, or a machine that does much else was too slow for this run.
fn was_read(measured: &Value) -> bool {
    let came = &measured["came"];
    came["bytes"]["bytes"].is_u64() || (measured["run"] == 16 << 20 && came["left_out"].is_string())
}

#[test]
fn a_link_is_tested_both_ways_and_both_ends_hear_of_it() {
    let listener = Listener::start(&[]);
    let (code, report, errors) = listener.test(&[]);
    assert!(wrong(&report).is_empty(), "{report:#}");
    let works = report["works"].as_bool().unwrap();
    assert_eq!((code, errors.as_str()), (Some(if works { 0 } else { 2 }), ""));
    // Two numbers of sockets, three lengths of runs, and round trips, both ways.
    let measured = report["measured"].as_array().unwrap();
    assert_eq!(measured.len(), 2 * 6);
    for one in measured {
        let came = &one["came"];
        match one["what"].as_str().unwrap() {
            "sockets" => assert!(came["bytes"]["bytes"].is_u64(), "{one}"),
            "read" => assert!(was_read(one), "{one}"),
            "round_trips" => assert!(came["trips"]["median_us"].is_f64(), "{one}"),
            other => panic!("{other}"),
        }
    }
    let runs: Vec<&Value> =
        measured.iter().map(|one| &one["run"]).filter(|run| !run.is_null()).collect();
    assert_eq!(runs, [2048, 65_536, 16_777_216, 2048, 65_536, 16_777_216]);
    assert_eq!(report["tester"]["interface"]["name"], "lo");
    assert!(report["path"]["mtu"].as_u64().unwrap() > 1000);
    let (theirs, output, errors) = listener.ended();
    assert_eq!((theirs, errors.as_str()), (code, ""));
    assert!(output.contains("tcp, runs of 16 MiB") && output.contains("the link is"), "{output}");
}

#[test]
fn who_has_another_key_is_told_and_so_is_who_listens() {
    let listener = Listener::start(&["--timeout", "3"]);
    for (key, words) in [
        (Some("another key, as long"), "the peer does not hold the same key"),
        (None, "the peer expects a shared key, this side has no protection"),
    ] {
        let (code, output, errors) = ended(kvferry(&[&listener.at], key).spawn().unwrap());
        assert_eq!((code, output.as_str()), (Some(1), ""));
        assert!(errors.contains(words) && errors.contains(&listener.at), "{errors}");
    }
    let (code, _, errors) = listener.ended();
    assert_eq!(code, Some(1));
    for words in ["turned 127.0.0.1:", "does not hold the same key", "nobody has connected"] {
        assert!(errors.contains(words), "{words}: {errors}");
    }
}

#[test]
fn strangers_hold_nobody_up() {
    let listener = Listener::start(&[]);
    // One who says what makes no sense, and more who say nothing than there are places for.
    let mut babbles = TcpStream::connect(&listener.at).unwrap();
    babbles.set_read_timeout(Some(LONG)).unwrap();
    babbles.write_all(&[0xff; 9]).unwrap();
    assert!(babbles.read(&mut [0]).is_ok_and(|n| n == 0), "it is let in");
    let silent: Vec<_> = (0..80).map(|_| TcpStream::connect(&listener.at).unwrap()).collect();
    let (_, report, _) = listener.test(&[]);
    assert!(wrong(&report).is_empty(), "{report:#}");
    let (_, output, errors) = listener.ended();
    assert!(output.contains("the link is"), "{output}");
    assert!(errors.contains("its first bytes are not kvferry's"), "{errors}");
    drop(silent);
}

/// Whoever holds the key may still say anything.
#[test]
fn an_end_that_makes_no_sense_ends_the_test() {
    let version = json!({"version": 7, "release": "9.9.9"}).to_string();
    for (word, says) in [
        ("{\"version\": 1, \"release\"", "the other end says what this one ("),
        ("", "broke off the test"),
        (&*version, "tests links as version 7 (kvferry 9.9.9), this one as version 1 (kvferry"),
    ] {
        let listener = Listener::start(&[]);
        let mut conversation = listener.talk("kvferry link");
        let until = Instant::now() + LONG;
        if !word.is_empty() {
            conversation.send(word.as_bytes(), until).unwrap();
            let answer = conversation.receive(1 << 20, until).unwrap();
            let answer: Value = serde_json::from_slice(&answer).unwrap();
            assert_eq!(answer["version"], 1);
        }
        drop(conversation);
        let (code, output, errors) = listener.ended();
        assert_eq!((code, output.as_str()), (Some(1), "\n"));
        assert!(errors.contains(says), "{errors}");
    }
}

#[test]
fn who_is_no_link_test_is_named() {
    let listener = Listener::start(&["--timeout", "2"]);
    let status = listener.talk("kvferry status");
    let (code, _, errors) = listener.ended();
    assert_eq!(code, Some(1));
    assert!(errors.contains("it is 'kvferry status', and no link test"), "{errors}");
    drop(status);

    let key = "the key of both sides";
    let trust = Trust::Key(Key::new(key.as_bytes()).unwrap());
    let engine = Listening::start((Ipv4Addr::LOCALHOST, 0).into(), trust).unwrap();
    let at = engine.address().to_string();
    let accepted = thread::spawn(move || engine.accept("p", Instant::now() + LONG, |_, _| ()));
    let (code, _, errors) = ended(kvferry(&[&at], Some(key)).spawn().unwrap());
    assert_eq!(code, Some(1));
    assert!(errors.contains("listens the engine 'p', not a link test"), "{errors}");
    assert!(accepted.join().unwrap().is_some());
}

#[test]
fn an_end_that_cannot_be_connected_to_is_named() {
    let refuses = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let at = refuses.local_addr().unwrap().to_string();
    drop(refuses);
    let (code, _, errors) = ended(kvferry(&[&at], None).spawn().unwrap());
    assert_eq!(code, Some(1));
    for words in [&*at, "refused", "Start 'kvferry link --listen'"] {
        assert!(errors.contains(words), "{errors}");
    }

    // Packets are dropped: what has no room for another connection does not answer at all.
    let full = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    // SAFETY: a plain system call on a socket that is open.
    assert_eq!(unsafe { libc::listen(full.as_raw_fd(), 0) }, 0);
    let at = full.local_addr().unwrap();
    let patience = Duration::from_millis(300);
    let waiting: Vec<_> = (0..20)
        .map(|_| TcpStream::connect_timeout(&at, patience))
        .take_while(Result::is_ok)
        .collect();
    assert!(waiting.len() < 20, "it is never full");
    let at = at.to_string();
    let (code, _, errors) = ended(kvferry(&[&at, "--timeout", "1"], None).spawn().unwrap());
    assert_eq!(code, Some(1));
    for words in [&*at, "for 1 s", "a firewall drops what goes from here to"] {
        assert!(errors.contains(words), "{errors}");
    }
}

#[test]
fn an_end_that_lacks_something_says_what() {
    let listener =
        Listener::with(&["--memory", "gpu:0"], &[("KVFERRY_CUDA_DRIVER", "/no/such/driver")]);
    let (code, _, errors) = ended(kvferry(&[&listener.at], Some(&listener.key)).spawn().unwrap());
    assert_eq!(code, Some(1));
    for words in ["the other end cannot test the link", "CUDA's driver", "/no/such/driver"] {
        assert!(errors.contains(words), "{words}: {errors}");
    }
    assert_eq!(listener.ended().0, Some(1));

    let listener = Listener::start(&[]);
    let all = [&*listener.at, "--json", "--seconds", "1", "--transport", "nixl"];
    let mut tester = kvferry(&all, Some(&listener.key));
    let (code, output, _) = ended(tester.env("KVFERRY_NIXL", "/no/such/nixl").spawn().unwrap());
    assert_eq!(code, Some(2));
    let report: Value = serde_json::from_str(&output).unwrap();
    let left_out = report["left_out"][0].as_str().unwrap();
    assert!(left_out.starts_with("nixl: not on this host: "), "{left_out}");
    assert_eq!(wrong(&report)[0]["what"], "transport");
}

const BOTH: [&str; 2] = ["--transport", "tcp,nixl"];

/// Of a card on one side and of the host on the other: the card is one that a CPU stands in for.
#[test]
fn memory_of_a_card() {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../kvferry-bench/tests/gpu/driver.c");
    let driver = concat!(env!("CARGO_TARGET_TMPDIR"), "/liblinkstandin.so");
    let built = Command::new("cc")
        .args(["-std=gnu11", "-O2", "-shared", "-fPIC", "-pthread", "-o", driver, source])
        .arg(concat!("-I", env!("CARGO_MANIFEST_DIR"), "/../kvferry-cuda/src"))
        .status();
    assert!(built.unwrap().success(), "driver.c does not compile");
    let install = Command::new(env!("CARGO_BIN_EXE_kvferry")).args(["nixl", "install"]).output();
    assert!(install.unwrap().status.success());

    let stands_in = [("KVFERRY_CUDA_DRIVER", driver), ("KVFERRY_NVRTC", driver)];
    let listener = Listener::with(&BOTH, &stands_in);
    let all = [&*listener.at, "--json", "--seconds", "1", BOTH[0], BOTH[1], "--memory", "gpu:0"];
    let mut tester = kvferry(&all, Some(&listener.key));
    let (_, output, errors) = ended(tester.envs(stands_in).spawn().unwrap());
    let report: Value = serde_json::from_str(&output).unwrap_or_else(|_| panic!("{errors}"));
    assert!(wrong(&report).is_empty(), "{report:#}");
    assert_eq!(
        (&report["tester"]["memory"], &report["listener"]["memory"]),
        (&json!("gpu:0"), &json!("host"))
    );
    let measured = report["measured"].as_array().unwrap();
    for transport in ["tcp", "nixl"] {
        let of = |one: &&Value| one["transport"] == transport && one["what"] == "read";
        let read = measured.iter().filter(of);
        assert!(read.clone().count() == 6 && read.into_iter().all(was_read), "{report:#}");
    }
    listener.ended();
}

/// Three ports in a row that are free on both addresses, each with who listens at the second.
fn ports(elsewhere: IpAddr) -> (u16, Vec<TcpListener>) {
    for number in 0..1000 {
        let first = 20_000 + (std::process::id() as u16 % 1000) * 8 + number * 3 % 4000;
        let here = (first..first + 3).map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)));
        let here: Result<Vec<_>, _> = here.collect();
        let there = (first..first + 3).map(|port| TcpListener::bind((elsewhere, port)));
        if let (Ok(_), Ok(there)) = (here, there.collect()) {
            return (first, there);
        }
    }
    panic!("no free ports");
}

/// Passes on what comes in at `from` to `to`, and changes one byte deep in what comes back.
fn pass_on(from: TcpListener, to: SocketAddr, change: bool) {
    thread::spawn(move || {
        for near in from.incoming() {
            let (near, far) = (near.unwrap(), TcpStream::connect(to).unwrap());
            let ways = [(&near, &far, false), (&far, &near, change)];
            for (from, to, change) in ways {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                thread::spawn(move || {
                    let (mut buffer, mut passed) = (vec![0; 64 << 10], 0);
                    while let Ok(n @ 1..) = from.read(&mut buffer) {
                        // What opens a connection is short. A byte in the middle of much is content.
                        if change && passed > 100_000 && n > 10_000 {
                            buffer[n / 2] ^= 0x40;
                        }
                        passed += n;
                        if to.write_all(&buffer[..n]).is_err() {
                            break;
                        }
                    }
                    _ = to.shutdown(std::net::Shutdown::Write);
                });
            }
        }
    });
}

#[test]
fn bytes_that_something_on_the_way_changes_are_found_and_shown() {
    let elsewhere = Ipv4Addr::new(127, 0, 0, 2).into();
    let (port, doors) = ports(elsewhere);
    for (number, door) in (0..).zip(doors) {
        let to = (Ipv4Addr::LOCALHOST, port + number).into();
        // Plain sockets are the first; nobody looks at what they carry.
        pass_on(door, to, number == 1);
    }
    let port = port.to_string();
    let listener = Listener::start(&["--data-port", &port, "--advertise", "127.0.0.2"]);
    let (code, report, _) = listener.test(&[]);
    assert_eq!((code, &report["works"]), (Some(2), &json!(false)), "{report:#}");
    // The listener reads by a way that changes nothing.
    let [corrupt] = wrong(&report)[..] else { panic!("{report:#}") };
    assert_eq!(corrupt["what"], "corrupt");
    let measured = report["measured"].as_array().unwrap();
    let shown = measured.iter().find_map(|one| one["came"].get("corrupt")).unwrap();
    let [at, sent, came] = ["at", "sent", "came"].map(|name| shown[name].as_u64().unwrap());
    assert_eq!(sent ^ came, 0x40);
    let values = format!("byte {at} was sent as {sent:#04x} and came as {came:#04x}");
    let says = corrupt["says"].as_str().unwrap();
    assert!(says.contains(&values) && says.contains("127.0.0.1 reads from 127.0.0.2"), "{says}");
    let (code, output, _) = listener.ended();
    assert_eq!(code, Some(2));
    assert!(
        output.contains(&values) && output.contains("start no engines over this link"),
        "{output}"
    );
    assert!(output.contains("the link is not fine: corrupt"), "{output}");
}

#[test]
fn ports_that_cannot_be_reached_are_named_with_the_direction() {
    let elsewhere = Ipv4Addr::new(127, 0, 0, 2).into();
    let (port, doors) = ports(elsewhere);
    drop(doors);
    let first = port.to_string();
    let listener = Listener::start(&["--data-port", &first, "--advertise", "127.0.0.2"]);
    let (code, report, _) = listener.test(&[]);
    assert_eq!(code, Some(2));
    let wrong = wrong(&report);
    assert_eq!(wrong.len(), 2, "{report:#}");
    for (finding, (by, port)) in wrong.into_iter().zip([("plain sockets", port), ("tcp", port + 1)])
    {
        assert_eq!(finding["what"], "unreachable");
        let says = format!("127.0.0.1 cannot connect to 127.0.0.2:{port} ({by}): ");
        assert!(finding["says"].as_str().unwrap().starts_with(&says), "{finding}");
    }
    assert_eq!(listener.ended().0, Some(2));
}
