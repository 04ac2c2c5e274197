//! Messages over one connection, authenticated and encrypted where there is something to do it with.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use snow::{Builder, StatelessTransportState};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::overheard::{KEPT, Overheard};
use super::trust::{Tls, Trust};
use crate::error::{Misbehaviour, PeerError};

const MAGIC: &[u8; 8] = b"kvferry\x01";
const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// What Noise allows in one message, and what of that is its authentication.
const NOISE_BYTES: usize = 65_535;
const NOISE_TAG: usize = 16;
/// How long both messages of a Noise handshake of this pattern are: a public key, and its authentication.
const NOISE_GREETING: usize = 48;
/// Who is turned away may take so long to hear why.
const FAREWELL: Duration = Duration::from_secs(1);

/// How someone does not greet.
const CLOSED: &str = "it closed the connection";

/// Longest message before the two sides have greeted each other.
pub(crate) const MAX_OPENING: usize = 4 << 10;
/// Longest question.
pub(crate) const MAX_QUESTION: usize = 8 << 20;
/// Longest answer: the cards of many ranks.
pub(crate) const MAX_REPLY: usize = 256 << 20;

/// A connection that bytes go both ways on: TCP, TLS, or bytes in memory.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin + 'static> Stream for S {}

/// The half that receives.
pub(crate) struct Receiver {
    stream: Box<dyn AsyncRead + Send + Unpin>,
    noise: Option<(Arc<StatelessTransportState>, u64)>,
    /// Decrypted, but not yet asked for.
    pending: Vec<u8>,
}

/// The half that sends.
pub(crate) struct Sender {
    stream: Box<dyn AsyncWrite + Send + Unpin>,
    noise: Option<(Arc<StatelessTransportState>, u64)>,
}

/// Opens a connection as the side that connected. `address` is what was connected to.
pub(crate) async fn open(
    mut stream: impl Stream,
    trust: &Trust,
    address: &str,
) -> Result<(Sender, Receiver), PeerError> {
    let prologue = prologue(trust);
    stream.write_all(&prologue).await.map_err(|e| io_error("connecting", &e))?;
    match trust {
        Trust::Loopback | Trust::Insecure => Ok(halves(stream, None)),
        Trust::Tls(tls) => {
            let name = Tls::name(address)
                .ok_or_else(|| PeerError::Tls(format!("'{address}' has no host name")))?;
            let connector = tokio_rustls::TlsConnector::from(tls.client.clone());
            match connector.connect(name, Overheard::new(stream)).into_fallible().await {
                Ok(stream) => Ok(halves(stream, None)),
                Err((error, heard)) => Err(without_tls(&error, heard, trust.mode()).await),
            }
        }
        Trust::Key(key) => {
            let builder = noise_builder(&prologue, key.own())?;
            let mut noise = builder.build_initiator().map_err(|_| PeerError::Untrusted)?;
            let mut buffer = [0; 256];
            let n = noise.write_message(&[], &mut buffer).map_err(|_| PeerError::Untrusted)?;
            write_frame(&mut stream, &buffer[..n]).await.map_err(|e| io_error("connecting", &e))?;
            // That the connection ends here says nothing of keys: a port that is overloaded ends it, too.
            let mut length = [0; 2];
            stream.read_exact(&mut length).await.map_err(|e| not_greeted(&e))?;
            if usize::from(u16::from_le_bytes(length)) != NOISE_GREETING {
                return Err(not_an_agent(&length, &mut stream, trust.mode()).await);
            }
            let mut answer = [0; NOISE_GREETING];
            stream.read_exact(&mut answer).await.map_err(|e| not_greeted(&e))?;
            noise.read_message(&answer, &mut buffer).map_err(|_| PeerError::Untrusted)?;
            sealed(stream, noise)
        }
    }
}

/// Accepts a connection. A peer that cannot prove itself learns how one would have to, and that it has not.
pub(crate) async fn accept(
    mut stream: impl Stream,
    trust: &Trust,
) -> Result<(Sender, Receiver), PeerError> {
    let prologue = prologue(trust);
    let mut theirs = [0; 9];
    stream.read_exact(&mut theirs).await.map_err(|e| io_error("accepting", &e))?;
    if theirs[..8] != prologue[..8] {
        return Err(PeerError::Misbehaved(Misbehaviour::Magic));
    }
    if theirs[8] != prologue[8] {
        let (theirs, ours) = (theirs[8], prologue[8]);
        // Whoever wants to know could try them all.
        dismiss(stream, &prologue).await;
        return Err(PeerError::Misbehaved(Misbehaviour::Mode { theirs, ours }));
    }
    match trust {
        Trust::Loopback | Trust::Insecure => Ok(halves(stream, None)),
        Trust::Tls(tls) => {
            let acceptor = tokio_rustls::TlsAcceptor::from(tls.server.clone());
            match acceptor.accept(stream).into_fallible().await {
                Ok(stream) => Ok(halves(stream, None)),
                Err((error, stream)) => {
                    // TLS has said why.
                    dismiss(stream, &[]).await;
                    Err(tls_error(&error))
                }
            }
        }
        Trust::Key(key) => {
            let mut buffer = [0; 256];
            let mut first = [0; 2 + NOISE_GREETING];
            stream.read_exact(&mut first[..2]).await.map_err(|e| io_error("accepting", &e))?;
            if first[..2] != (NOISE_GREETING as u16).to_le_bytes() {
                return Err(PeerError::Misbehaved(Misbehaviour::Garbage));
            }
            stream.read_exact(&mut first[2..]).await.map_err(|e| io_error("accepting", &e))?;
            let mut proven = None;
            for key in key.accepted() {
                let builder = noise_builder(&prologue, key)?;
                let mut noise = builder.build_responder().map_err(|_| PeerError::Untrusted)?;
                if noise.read_message(&first[2..], &mut buffer).is_ok() {
                    proven = Some(noise);
                    break;
                }
            }
            let Some(mut noise) = proven else {
                // An answer that opens with no key: a peer that has another one then knows.
                if getrandom::fill(&mut first[2..]).is_ok() {
                    // As in a public key.
                    first[2 + 31] &= 0x7f;
                    dismiss(stream, &first).await;
                }
                return Err(PeerError::Untrusted);
            };
            let n = noise.write_message(&[], &mut buffer).map_err(|_| PeerError::Untrusted)?;
            write_frame(&mut stream, &buffer[..n]).await.map_err(|e| io_error("accepting", &e))?;
            sealed(stream, noise)
        }
    }
}

fn prologue(trust: &Trust) -> [u8; 9] {
    let mut bytes = [0; 9];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8] = trust.mode();
    bytes
}

fn noise_builder<'a>(prologue: &'a [u8], key: &'a [u8; 32]) -> Result<Builder<'a>, PeerError> {
    let pattern = PATTERN.parse().map_err(|_| PeerError::Untrusted)?;
    let builder = Builder::new(pattern).prologue(prologue);
    builder.and_then(|builder| builder.psk(0, key)).map_err(|_| PeerError::Untrusted)
}

fn sealed(
    stream: impl Stream,
    noise: snow::HandshakeState,
) -> Result<(Sender, Receiver), PeerError> {
    let noise = noise.into_stateless_transport_mode().map_err(|_| PeerError::Untrusted)?;
    Ok(halves(stream, Some(Arc::new(noise))))
}

fn halves(stream: impl Stream, noise: Option<Arc<StatelessTransportState>>) -> (Sender, Receiver) {
    let (read, write) = tokio::io::split(stream);
    let numbered = noise.map(|noise| (noise, 0));
    let sender = Sender { stream: Box::new(write), noise: numbered.clone() };
    (sender, Receiver { stream: Box::new(read), noise: numbered, pending: vec![] })
}

impl Sender {
    /// Sends one message.
    pub(crate) async fn send(&mut self, message: &[u8]) -> Result<(), PeerError> {
        let length = u32::try_from(message.len())
            .map_err(|_| too_long(message.len() as u64, u32::MAX.into()))?;
        let mut bytes = Vec::with_capacity(4 + message.len());
        bytes.extend(length.to_le_bytes());
        bytes.extend(message);
        if let Some((noise, number)) = &mut self.noise {
            let clear = std::mem::take(&mut bytes);
            let mut buffer = vec![0; NOISE_BYTES];
            for chunk in clear.chunks(NOISE_BYTES - NOISE_TAG) {
                let n = noise
                    .write_message(*number, chunk, &mut buffer)
                    .map_err(|_| PeerError::Misbehaved(Misbehaviour::Forged))?;
                *number += 1;
                bytes.extend((n as u16).to_le_bytes());
                bytes.extend(&buffer[..n]);
            }
        }
        self.stream.write_all(&bytes).await.map_err(|e| io_error("sending", &e))?;
        self.stream.flush().await.map_err(|e| io_error("sending", &e))
    }
}

impl Receiver {
    /// Receives the first message of whoever was connected to. Who that is, is not known yet.
    pub(crate) async fn greeting(&mut self) -> Result<Vec<u8>, PeerError> {
        let head = self.take(4, not_greeted).await?;
        let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
        if !(4..=MAX_OPENING).contains(&length) {
            // Who proves itself first has done so: nobody else gets here.
            return Err(not_an_agent(&head, &mut self.stream, Trust::Insecure.mode()).await);
        }
        self.take(length, not_greeted).await
    }

    /// Receives one message of at most `longest` bytes.
    pub(crate) async fn receive(&mut self, longest: usize) -> Result<Vec<u8>, PeerError> {
        let failed = |error: &io::Error| io_error("receiving", error);
        let length = self.take(4, failed).await?;
        let length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]) as usize;
        if length > longest {
            return Err(too_long(length as u64, longest as u64));
        }
        self.take(length, failed).await
    }

    /// The next `n` bytes. Memory grows with what has arrived, not with what was promised.
    async fn take(
        &mut self,
        n: usize,
        failed: impl Fn(&io::Error) -> PeerError,
    ) -> Result<Vec<u8>, PeerError> {
        let Some((noise, number)) = &mut self.noise else {
            let mut bytes = Vec::with_capacity(n.min(NOISE_BYTES));
            let mut limited = (&mut self.stream).take(n as u64);
            let got = limited.read_to_end(&mut bytes).await;
            return match got {
                Ok(got) if got == n => Ok(bytes),
                Ok(_) => Err(failed(&io::ErrorKind::UnexpectedEof.into())),
                Err(error) => Err(failed(&error)),
            };
        };
        let mut buffer = vec![0; NOISE_BYTES];
        while self.pending.len() < n {
            let frame = read_frame(&mut self.stream).await.map_err(|e| failed(&e))?;
            // The number is not sent: a frame that is repeated, left out or moved does not open.
            let got = noise
                .read_message(*number, &frame, &mut buffer)
                .map_err(|_| PeerError::Misbehaved(Misbehaviour::Forged))?;
            *number += 1;
            self.pending.extend(&buffer[..got]);
        }
        let rest = self.pending.split_off(n);
        Ok(std::mem::replace(&mut self.pending, rest))
    }
}

/// Why TLS was not to be had from whoever was connected to.
async fn without_tls(error: &io::Error, mut heard: Overheard<impl Stream>, ours: u8) -> PeerError {
    if !heard.is_tls() {
        return not_an_agent(&heard.first, &mut heard.stream, ours).await;
    }
    // rustls's own errors are of no kind that the system has for a connection that ends.
    let ended =
        [io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe];
    if heard.first.is_empty() && ended.contains(&error.kind()) {
        return PeerError::NoGreeting(CLOSED);
    }
    tls_error(error)
}

/// Why there is no greeting.
fn not_greeted(error: &io::Error) -> PeerError {
    match error.get_ref() {
        // This side's certificate was not accepted, for instance.
        Some(inner) if inner.is::<rustls::Error>() => tls_error(error),
        _ => PeerError::NoGreeting(CLOSED),
    }
}

/// What to say of someone who began like this.
async fn not_an_agent<S: AsyncRead + Unpin + ?Sized>(
    began: &[u8],
    stream: &mut S,
    ours: u8,
) -> PeerError {
    let mut said = began.to_vec();
    // What there is already, to show more than the first letters; and all that an agent says who has other trust.
    let more = async {
        let mut buffer = [0; KEPT];
        loop {
            let n = stream.read(&mut buffer[..KEPT - said.len()]).await.unwrap_or(0);
            said.extend(&buffer[..n]);
            let begins_well = said.iter().zip(MAGIC).all(|(theirs, ours)| theirs == ours);
            if n == 0 || !begins_well || said.len() > MAGIC.len() {
                break;
            }
        }
    };
    _ = timeout(Duration::from_millis(100), more).await;
    if let Some([theirs, ..]) = said.strip_prefix(MAGIC) {
        return PeerError::OtherTrust { theirs: *theirs, ours };
    }
    let line = said.split(|byte| b"\r\n".contains(byte)).next().unwrap_or(&said);
    PeerError::NotAnAgent(line.escape_ascii().to_string())
}

/// The last word to someone who is turned away. What it has sent meanwhile is heard, since a connection that is closed
/// over something unheard takes the last word with it.
async fn dismiss(mut stream: impl Stream, word: &[u8]) {
    let said = async {
        stream.write_all(word).await?;
        stream.shutdown().await?;
        let (mut heard, mut left) = ([0; 256], MAX_OPENING);
        while left > 0 {
            match stream.read(&mut heard).await? {
                0 => break,
                n => left = left.saturating_sub(n),
            }
        }
        Ok::<_, io::Error>(())
    };
    _ = timeout(FAREWELL, said).await;
}

async fn read_frame<S: AsyncRead + Unpin + ?Sized>(stream: &mut S) -> io::Result<Vec<u8>> {
    let mut length = [0; 2];
    stream.read_exact(&mut length).await?;
    let mut frame = vec![0; usize::from(u16::from_le_bytes(length))];
    stream.read_exact(&mut frame).await?;
    Ok(frame)
}

async fn write_frame(stream: &mut impl Stream, frame: &[u8]) -> io::Result<()> {
    let mut bytes = (frame.len() as u16).to_le_bytes().to_vec();
    bytes.extend(frame);
    stream.write_all(&bytes).await
}

fn too_long(bytes: u64, limit: u64) -> PeerError {
    PeerError::Misbehaved(Misbehaviour::TooLong { bytes, limit })
}

pub(crate) fn io_error(what: &'static str, error: &io::Error) -> PeerError {
    PeerError::Io { what, kind: error.kind() }
}

fn tls_error(error: &io::Error) -> PeerError {
    PeerError::Tls(error.to_string())
}
