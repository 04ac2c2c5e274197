//! What both ends do with others that do not play by the rules.

mod answers;
mod greeting;
mod packed;
mod requests;
mod sealed;
mod slots;
mod strangers;

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use kvferry_layout::Region;

use super::channel::Channel;
use super::frame::{Answer, Challenge, Hello, Request, Verb, Verdict, put_span};
use super::proof::{End, Said, Secret};
use super::seal::{Cipher, Terms};
use super::socket::Socket;
use super::{Address, Bounds, DESCRIPTION, Tcp, TcpOptions, parse};
use crate::contract::Transport;
use crate::memory::HostMemory;
use crate::shared::bytes::put_block;
use crate::shared::io::IoThreads;
use crate::shared::random::random;

const PAGE: usize = 4096;
/// Fills what is registered.
const OPEN: u8 = 0x11;
/// Fills what is not.
const SECRET: u8 = 0xc7;

/// As between two engines of one host.
const TERMS: Terms = Terms { cipher: Cipher::Aes, content: false };

/// What waits for the sockets of these tests.
static IO: LazyLock<Arc<IoThreads>> = LazyLock::new(|| IoThreads::of_this_process().unwrap());

fn socket(stream: TcpStream) -> Socket {
    let _tasks = IO.next().enter();
    let patience = Duration::from_secs(20);
    let mut socket = Socket::new(Arc::new(stream), patience).unwrap();
    socket.receive_within(Some(patience));
    socket
}

/// Waits here for what a task would wait for.
fn now<T>(future: impl Future<Output = T>) -> T {
    IO.next().block_on(future)
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// A server whose memory is registered in the middle only.
struct Victim {
    transport: Tcp,
    memory: HostMemory,
}

impl Victim {
    fn new() -> Self {
        Self::with(Bounds::of_this_process())
    }

    fn with(bounds: Bounds) -> Self {
        let memory = HostMemory::new(3 * PAGE).unwrap();
        memory.write(0, &[SECRET; 3 * PAGE]);
        memory.write(PAGE, &[OPEN; PAGE]);
        let transport =
            Tcp::with(TcpOptions::default(), bounds, Arc::new(AtomicU64::new(0))).unwrap();
        let victim = Self { transport, memory };
        let region = Region::host(victim.base() + PAGE as u64, PAGE as u64);
        // SAFETY: the transport is dropped before the memory, in the order of the fields; the
        // memory is only touched through its address.
        unsafe { victim.transport.register(region) }.unwrap();
        victim
    }

    fn address(&self) -> Address {
        parse(&self.transport.describe().unwrap()).unwrap()
    }

    fn base(&self) -> u64 {
        self.memory.base()
    }

    /// Whether all of it is as it was: nobody can write here.
    fn is_unharmed(&self) -> bool {
        let fill = |at: usize| if at / PAGE == 1 { OPEN } else { SECRET };
        self.memory.snapshot().into_iter().enumerate().all(|(at, byte)| byte == fill(at))
    }

    fn connect(&self, change: impl FnOnce(&mut [u8; Hello::BYTES])) -> TcpStream {
        self.connect_with(change, |_| ())
    }

    /// Connects with a hello and a token that are not quite right. Goes on as far as the server does.
    fn connect_with(
        &self,
        change: impl FnOnce(&mut [u8; Hello::BYTES]),
        spoil: impl FnOnce(&mut [u8; 32]),
    ) -> TcpStream {
        let address = self.address();
        let mut secret = address.secret;
        spoil(&mut secret.token);
        let mut hello = Hello { nonce: random().unwrap(), terms: TERMS }.encode();
        change(&mut hello);
        let mut stream = TcpStream::connect(address.at).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        // Or what follows the proof waits 40 ms for the server's acknowledgement of it.
        stream.set_nodelay(true).unwrap();
        stream.write_all(&hello).unwrap();
        let mut challenge = [0; Challenge::BYTES];
        if stream.read_exact(&mut challenge).is_ok() {
            let Challenge { nonce, terms, .. } = Challenge::decode(&challenge).unwrap();
            let said = Said { hello, nonce, terms };
            let _ = stream.write_all(&secret.prove(End::Client, &said));
        }
        stream
    }

    /// A connection that was let in: it is told which regions there are.
    fn enter(&self) -> Guest {
        let address = self.address();
        let mut guest =
            Guest::new(TcpStream::connect(address.at).unwrap(), &address.secret).unwrap();
        assert!(guest.is_served());
        guest
    }
}

/// A client that is let in, and says what it likes.
struct Guest(Channel);

impl Guest {
    /// Says everything that it takes to be let in.
    fn new(mut stream: TcpStream, secret: &Secret) -> io::Result<Self> {
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        // Or what follows the proof waits 40 ms for the server's acknowledgement of it.
        stream.set_nodelay(true)?;
        let hello = Hello { nonce: random().unwrap(), terms: TERMS }.encode();
        stream.write_all(&hello)?;
        let mut challenge = [0; Challenge::BYTES];
        stream.read_exact(&mut challenge)?;
        let Challenge { nonce, terms, .. } = Challenge::decode(&challenge).unwrap();
        let said = Said { hello, nonce, terms };
        stream.write_all(&secret.prove(End::Client, &said))?;
        Ok(Self(Channel::new(socket(stream), End::Client, terms, &secret.secrets(&said))))
    }

    fn stream(&self) -> &TcpStream {
        self.0.stream()
    }

    fn ask(&mut self, request: &[u8]) {
        // It may have been let go already.
        let _ = now(self.0.send(request));
    }

    /// The next answer, and the bytes behind it. `None` where the server has hung up.
    fn hear(&mut self) -> Option<(Answer, Vec<u8>)> {
        let mut frame = vec![];
        if !now(self.0.receive(&mut frame)).ok()? {
            return None;
        }
        let answer = Answer::decode(frame[..].try_into().unwrap()).unwrap();
        let sent = if answer.verdict == Verdict::Done { answer.bytes } else { 0 };
        let mut bytes = vec![0; sent as usize];
        now(self.0.receive_own(&mut bytes)).ok()?;
        Some((answer, bytes))
    }

    fn is_served(&mut self) -> bool {
        self.ask(&request(Verb::Regions, 1, &[]));
        let mut frame = vec![];
        if !matches!(now(self.0.receive(&mut frame)), Ok(true)) {
            return false;
        }
        let answer = Answer::decode(frame[..].try_into().unwrap()).unwrap();
        now(self.0.receive_sealed(&mut vec![0; answer.bytes as usize])).is_ok()
    }
}

/// What a server with this secret would tell of itself if it listened here.
fn described(secret: &Secret, listener: &TcpListener) -> Vec<u8> {
    let mut description = DESCRIPTION.to_vec();
    description.extend(secret.instance.0);
    description.extend(secret.token);
    put_block(&mut description, listener.local_addr().unwrap().to_string().as_bytes());
    // It packs nothing.
    description.extend(0u64.to_le_bytes());
    description.push(0);
    description
}

/// The next connection, once both ends have proved themselves.
fn let_in(listener: &TcpListener, secret: &Secret) -> io::Result<Channel> {
    let (mut stream, _) = listener.accept()?;
    let mut hello = [0; Hello::BYTES];
    stream.read_exact(&mut hello)?;
    let said = Said { hello, nonce: [8; 32], terms: TERMS };
    let proof = secret.prove(End::Server, &said);
    stream.write_all(&Challenge { nonce: said.nonce, terms: TERMS, proof }.encode())?;
    stream.read_exact(&mut [0; 32])?;
    Ok(Channel::new(socket(stream), End::Server, TERMS, &secret.secrets(&said)))
}

fn request(verb: Verb, id: u64, spans: &[(u64, u64)]) -> Vec<u8> {
    let bytes = spans.iter().map(|span| span.1).sum();
    let header = Request { verb, spans: spans.len() as u32, id, bytes };
    let mut out = header.encode().to_vec();
    for &(address, bytes) in spans {
        put_span(&mut out, address, bytes);
    }
    out
}

/// Everything the server says until it hangs up.
fn rest(mut stream: TcpStream) -> Vec<u8> {
    let _ = stream.shutdown(Shutdown::Write);
    let mut said = Vec::new();
    // A reset instead of an end is as good.
    let _ = stream.read_to_end(&mut said);
    said
}
