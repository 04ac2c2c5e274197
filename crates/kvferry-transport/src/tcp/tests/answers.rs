//! What a client does with answers that are not right.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use kvferry_layout::{ByteCopy, Region};

use super::super::frame::{Challenge, Hello, Request};
use super::super::proof::{End, Secret};
use super::super::{DESCRIPTION, Tcp, TcpOptions};
use super::{OPEN, PAGE, soon};
use crate::contract::{Error, Instance, Operation, Status, Transport};
use crate::memory::HostMemory;
use crate::shared::bytes::put_block;

/// A server that answers whatever it likes does no harm to the one who asks.
#[test]
fn spoiled_answers_are_errors() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let answers: [&'static [u8]; 4] = [
        // Another request's number.
        &[0, 0, 0, 0, 0, 0, 0, 0, 99, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0],
        // Too many bytes.
        &[0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x80],
        // No verdict.
        &[9, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0],
        // Cut off.
        &[0, 0, 0],
    ];
    let secret = Secret { instance: Instance([5; 16]), token: [0; 32] };
    let server = std::thread::spawn(move || {
        for number in 0.. {
            let (mut stream, _) = listener.accept().unwrap();
            let mut hello = [0; Hello::BYTES];
            if stream.read_exact(&mut hello).is_err() {
                return;
            }
            let nonce = [8; 32];
            let proof = secret.prove(End::Server, &hello, &nonce);
            stream.write_all(&Challenge { nonce, proof }.encode()).unwrap();
            let mut proof = [0; 32];
            if stream.read_exact(&mut proof).is_err() {
                return;
            }
            let mut request = [0; Request::BYTES + 16];
            if stream.read_exact(&mut request).is_err() {
                return;
            }
            let mut answer = answers[number % answers.len()].to_vec();
            // The requests of a lane are numbered on, whatever became of its connections.
            if number % answers.len() != 0 && answer.len() > 16 {
                answer[8..16].copy_from_slice(&request[8..16]);
            }
            stream.write_all(&answer).unwrap();
        }
    });
    let mut description = DESCRIPTION.to_vec();
    description.extend([5; 16]);
    description.extend([0; 32]);
    put_block(&mut description, address.to_string().as_bytes());
    let memory = HostMemory::new(PAGE).unwrap();
    memory.write(0, &[OPEN; PAGE]);
    let transport = Tcp::new(TcpOptions { connections: 1, ..TcpOptions::default() }).unwrap();
    let base = memory.base();
    // SAFETY: the transport is dropped before the memory.
    unsafe { transport.register(Region::host(base, PAGE as u64)) }.unwrap();
    let peer = transport.connect(&description, soon()).unwrap();
    let copy = ByteCopy { source: 4096, destination: base, bytes: 64 };
    let operation = transport.read(&peer, &[copy], soon()).unwrap();
    let status = operation.wait(soon());
    assert!(
        matches!(status, Status::Failed(Error::PeerMisbehaved(_) | Error::PeerLost(_))),
        "{status:?}"
    );
    drop(transport);
    assert!(memory.snapshot() == [OPEN; PAGE]);
    // One last connection, to let the server go.
    drop(TcpStream::connect(address));
    server.join().unwrap();
}
