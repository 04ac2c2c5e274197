//! Writes down what two agents of this release say to each other, for the tests of the next one:
//!
//! `RECORD=FILE cargo test -p kvferry-agent --test agents -- --ignored record`
//!
//! `../fixtures/README.md` says what is in the file, and `older.rs` what it is for.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::common::{By, Engine, LONG, Recipe, blocks_for, eventually};
use kvferry_agent::{Ticket, Trust, ask_status};

type Lines = Arc<Mutex<Vec<String>>>;

#[test]
#[ignore = "it writes a file, once in a release"]
fn record() {
    let file = std::env::var("RECORD").expect("RECORD names the file to write");
    // D extends a lease of this length before it loads.
    let term = Duration::from_millis(1500);
    let p = Recipe::new("p", 1).by(By::Held).term(term).start();
    let lines = Lines::default();
    let address = tap(p.scheduler.address().to_owned(), &lines);
    let d = Recipe::new("d", 1).by(By::Held).start();
    let ticket = |name: &str, blocks: &[u32], tokens: u64| {
        let ticket = Ticket { address: address.clone(), ..p.grant(name, blocks, tokens) };
        let json = serde_json::to_string(&ticket).unwrap();
        lines.lock().unwrap().push(format!("ticket {json}"));
        ticket
    };

    let blocks = blocks_for(22, 3);
    let wanted = ticket("wanted", &blocks, 22);
    d.scheduler.hold(&wanted, LONG);
    let asked = || lines.lock().unwrap().iter().filter(|line| line.contains('<')).count();
    // Its welcome, and an extension.
    eventually("an extension", || asked() >= 2);
    read(&d, &wanted, &blocks, 22);
    d.scheduler.settle(&wanted);
    p.wait_released();

    let unwanted = ticket("unwanted", &[1], 2);
    d.scheduler.abandon(&unwanted);
    p.wait_released();

    // By a block that was not granted, and when the lease has ended.
    let lost = ticket("lost", &[1], 2);
    read(&d, &lost, &[2], 2);
    p.scheduler.revoke("lost");
    lines.lock().unwrap().push("revoked lost".to_owned());
    p.wait_released();
    read(&d, &lost, &[1], 2);

    let mut misfit = Recipe::new("misfit", 1).by(By::Held);
    misfit.model = "another";
    let misfit = misfit.start();
    misfit.start_load("lost", &lost, &[1], &[1], 2, LONG);
    misfit.wait_ends("lost");

    ask_status(&address, &Trust::Loopback, LONG).unwrap();
    thread::sleep(Duration::from_millis(200));
    std::fs::write(file, lines.lock().unwrap().join("\n") + "\n").unwrap();
}

fn read(d: &Engine, ticket: &Ticket, source: &[u32], tokens: u64) {
    d.start_load(&ticket.request, ticket, source, &blocks_for(tokens, 9), tokens, LONG);
    d.ranks[0].held.as_ref().unwrap().next().finish();
    d.wait_ends(&ticket.request);
}

/// An address at which whatever is said to the agent at `there`, and by it, is written down.
fn tap(there: String, lines: &Lines) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let lines = lines.clone();
    thread::spawn(move || {
        for (number, client) in listener.incoming().enumerate() {
            let mut client = client.unwrap();
            let mut server = TcpStream::connect(&there).unwrap();
            let mut prologue = [0; 9];
            client.read_exact(&mut prologue).unwrap();
            server.write_all(&prologue).unwrap();
            lines.lock().unwrap().push(format!("{number} connects {}", hex(&prologue)));
            let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            for (way, from, to) in [('>', from, to), ('<', server, client)] {
                let lines = lines.clone();
                thread::spawn(move || {
                    pass(from, to, |frame| {
                        lines.lock().unwrap().push(format!("{number} {way} {}", hex(frame)));
                    });
                });
            }
        }
    });
    address
}

/// Passes messages on, each with its length before it.
fn pass(mut from: TcpStream, mut to: TcpStream, heard: impl Fn(&[u8])) {
    let mut length = [0; 4];
    while from.read_exact(&mut length).is_ok() {
        let mut message = vec![0; u32::from_le_bytes(length) as usize];
        if from.read_exact(&mut message).is_err() {
            return;
        }
        heard(&message);
        if to.write_all(&[&length, &*message].concat()).is_err() {
            return;
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
