//! A network that does what a test says.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// A wire between two agents that a test can cut, stop, listen to and tamper with.
pub struct Wire {
    pub address: String,
    state: Arc<WireState>,
}

#[derive(Default)]
struct WireState {
    stopped: AtomicBool,
    ended: AtomicBool,
    /// The client's bytes after this many are altered by one bit; 0: none.
    flip: AtomicU64,
    /// So many clients that come next are let go when they have said something.
    drop: AtomicU64,
    /// Milliseconds that bytes take longer, in each direction.
    delay: AtomicU64,
    open: Mutex<Vec<TcpStream>>,
    /// What clients said, one record for each connection.
    heard: Mutex<Vec<Arc<Mutex<Vec<u8>>>>>,
}

impl Wire {
    pub fn to(address: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let own = listener.local_addr().unwrap().to_string();
        let state = Arc::new(WireState::default());
        let (there, shared) = (address.to_owned(), state.clone());
        thread::spawn(move || {
            for client in listener.incoming() {
                if shared.ended.load(SeqCst) {
                    return;
                }
                let mut client = client.unwrap();
                if shared.drop.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok() {
                    _ = client.read(&mut [0; 256]);
                    continue;
                }
                let Ok(server) = TcpStream::connect(&there) else { continue };
                let heard: Arc<Mutex<Vec<u8>>> = Arc::default();
                shared.heard.lock().unwrap().push(heard.clone());
                let mut open = shared.open.lock().unwrap();
                open.push(client.try_clone().unwrap());
                open.push(server.try_clone().unwrap());
                let (a, b) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let state = shared.clone();
                thread::spawn(move || pump(a, b, &state, Some(&heard)));
                let state = shared.clone();
                thread::spawn(move || pump(server, client, &state, None));
            }
        });
        Self { address: own, state }
    }

    /// Bytes are held back, in both directions, until [`go`](Self::go).
    pub fn stop(&self) {
        self.state.stopped.store(true, SeqCst);
    }

    pub fn go(&self) {
        self.state.stopped.store(false, SeqCst);
    }

    /// Ends the connections of this moment.
    pub fn cut(&self) {
        for stream in self.state.open.lock().unwrap().drain(..) {
            _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// One bit of what the next client says is altered after so many bytes.
    pub fn flip_after(&self, bytes: u64) {
        self.state.flip.store(bytes, SeqCst);
    }

    /// The clients that come next, so many of them, are let go as soon as they have said something.
    pub fn drop_next(&self, clients: u64) {
        self.state.drop.store(clients, SeqCst);
    }

    pub fn clients_to_drop(&self) -> u64 {
        self.state.drop.load(SeqCst)
    }

    /// Bytes take so much longer from now on, in each direction.
    pub fn delay(&self, by: Duration) {
        self.state.delay.store(by.as_millis() as u64, SeqCst);
    }

    pub fn heard(&self) -> Vec<Vec<u8>> {
        let heard = self.state.heard.lock().unwrap();
        heard.iter().map(|one| one.lock().unwrap().clone()).collect()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.state.ended.store(true, SeqCst);
        self.go();
        self.cut();
        _ = TcpStream::connect(&self.address);
    }
}

fn pump(mut from: TcpStream, mut to: TcpStream, state: &WireState, heard: Option<&Mutex<Vec<u8>>>) {
    let mut buffer = [0; 4096];
    let mut passed = 0;
    loop {
        let n = match from.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(n) => n,
        };
        // One after the other: what is said meanwhile comes later still.
        thread::sleep(Duration::from_millis(state.delay.load(SeqCst)));
        while state.stopped.load(SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
        if let Some(heard) = heard {
            heard.lock().unwrap().extend(&buffer[..n]);
            let flip = state.flip.load(SeqCst);
            if flip > 0 && (passed..passed + n as u64).contains(&flip) {
                buffer[(flip - passed) as usize] ^= 1;
                state.flip.store(0, SeqCst);
            }
        }
        passed += n as u64;
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    _ = from.shutdown(Shutdown::Both);
    _ = to.shutdown(Shutdown::Both);
}
