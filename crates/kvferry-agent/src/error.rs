//! What can go wrong between two agents, and on this side, as data. (Why a request fails is in
//! [`rules::failure`](crate::rules::failure).)

use std::io;
use std::net::SocketAddr;

use crate::rules::lease::{AlreadyGranted, NotGrown};
use crate::wire::version::Version;

/// Why a connection to a peer cannot be had, or ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    /// The connection to the peer could not be made, or broke: the message says while doing what, and the
    /// operating system's reason.
    ///
    /// What to do: check that the other engine runs and that its address can be reached from here.
    #[error("{what}: {kind}")]
    Io {
        /// What was being done.
        what: &'static str,
        /// What the system said.
        kind: io::ErrorKind,
    },
    /// It takes too long.
    ///
    /// What to do: check the network between the two engines, and whether the other one is overloaded.
    #[error("{0} takes too long")]
    Slow(&'static str),
    /// Whoever listens at the address says something that no kvferry agent says.
    ///
    /// What to do: correct the address; a server has one port for HTTP and another for kvferry.
    #[error("whoever listens there is not a kvferry agent: it says \"{0}\"")]
    NotAnAgent(String),
    /// Whoever listens at the address took the connection, but did not greet as a kvferry agent does. It was tried
    /// again until the deadline, if there was time.
    ///
    /// What to do: see whether the other engine is overloaded, or its port under attack (its log says whom it turns
    /// away). If it is not, check that the address is that of a kvferry agent, and that one of an earlier release
    /// has the same key, or TLS, as this side.
    #[error(
        "whoever listens there has not greeted as a kvferry agent does: {0}. Its port may be overloaded or \
         under attack; or it is no such agent, or an older one with another key or other certificates"
    )]
    NoGreeting(&'static str),
    /// The peer expects another protection of the connection than this side offers: a key, TLS, or none.
    ///
    /// What to do: give both sides the same key, or both TLS, or both neither.
    #[error(
        "the peer expects {}, this side has {}. Give both sides the same key (file or environment), or both \
         TLS, or neither of them",
        protection(.theirs),
        protection(.ours)
    )]
    OtherTrust {
        /// What it expects.
        theirs: u8,
        /// What this side offers.
        ours: u8,
    },
    /// A ticket, or what an engine says of its ranks, names an address that this side does not connect to. It has not
    /// tried.
    ///
    /// What to do: if a peer is there, do what the message says. If none is, somebody sends requests that lead
    /// elsewhere: find out who.
    #[error("{address} is not connected to: {rule}")]
    OutOfReach {
        /// What is named.
        address: SocketAddr,
        /// What may be connected to instead, and how to change that.
        rule: String,
    },
    /// The peer did not prove that it holds our key.
    ///
    /// What to do: give both sides the same key, by file or in the environment.
    #[error(
        "the peer does not hold the same key as this side. Give both sides the same key (file or \
         environment)"
    )]
    Untrusted,
    /// The other end of a connection on this host belongs to another user, and there is no key.
    ///
    /// What to do: give both sides the same key, or run both as the same user. Where every user of the host may read
    /// the KV cache, say `insecure` on both sides.
    #[error(
        "the other end runs as another user ({theirs}; this side: {ours}), and there is no key: give both sides \
         the same key, run both as the same user, or say 'insecure' if every user of this host may read the KV cache"
    )]
    OtherUser {
        /// The other end's user.
        theirs: u32,
        /// This side's user.
        ours: u32,
    },
    /// The kernel does not say whose the other end of a connection on this host is, and there is no key.
    ///
    /// What to do: nothing, if the other end has just gone. Otherwise this kernel does not answer such questions
    /// (`NETLINK_SOCK_DIAG`): give both sides the same key.
    #[error(
        "the kernel does not say whose the other end is ({0}), and there is no key: give both sides the same key"
    )]
    UnknownUser(io::ErrorKind),
    /// A TLS connection could not be set up.
    ///
    /// What to do: check that both certificates come from the authority that both sides were given,
    /// that they are valid today, and that the peer's names the host that was connected to.
    #[error("TLS: {0}")]
    Tls(String),
    /// The peer broke the protocol.
    ///
    /// What to do: check that the address is that of a kvferry agent, and that both sides use a key,
    /// or both TLS, or both neither.
    #[error("the peer broke the protocol: {0}")]
    Misbehaved(Misbehaviour),
    /// The peer speaks another major version, or one that is more than one minor version away.
    ///
    /// What to do: upgrade kvferry on the older side; over several releases, one release at a time.
    #[error(
        "the peer speaks protocol {theirs}, this side {ours}: the major versions must be the same, and \
         the minor versions at most one apart. Upgrade kvferry on the older side"
    )]
    Version {
        /// What the peer speaks.
        theirs: Version,
        /// What this side speaks.
        ours: Version,
    },
    /// The peer says no, and why.
    ///
    /// What to do: change what the peer's reason names.
    #[error("the peer refuses: {0}")]
    Refused(String),
    /// The connection was given up on this side.
    ///
    /// What to do: nothing, if this engine is shutting down; otherwise look in the log for why the
    /// connection ended.
    #[error("the connection is closed")]
    Closed,
}

/// How a peer broke the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Misbehaviour {
    /// Its first bytes are not those of this protocol.
    ///
    /// What to do: find out what connects to this port; it is not an agent of kvferry.
    #[error("its first bytes are not kvferry's")]
    Magic,
    /// It wants a kind of protection that this side does not offer.
    ///
    /// What to do: give both sides a key, or both TLS, or both neither.
    #[error(
        "it opens the connection with {}, this side expects {}",
        protection(.theirs),
        protection(.ours)
    )]
    Mode {
        /// What it wants.
        theirs: u8,
        /// What this side offers.
        ours: u8,
    },
    /// A message longer than allowed.
    ///
    /// What to do: install the same release on both sides; if it is the same, somebody sends bad data
    /// on purpose, or the network corrupts it.
    #[error("a message of {bytes} bytes, where at most {limit} are allowed")]
    TooLong {
        /// How long it is, or says that it is.
        bytes: u64,
        /// How long it may be.
        limit: u64,
    },
    /// A message that cannot be decoded.
    ///
    /// What to do: as for a message that is too long.
    #[error("a message that cannot be decoded")]
    Garbage,
    /// A message that was altered on its way, or replayed.
    ///
    /// What to do: look for what alters traffic between the two machines; nothing of it was believed.
    #[error("a message that fails authentication")]
    Forged,
    /// An answer to a question that was not asked, or the wrong kind of answer.
    ///
    /// What to do: install the same release of kvferry on both sides.
    #[error("an answer that does not fit the question")]
    Answer,
}

/// What the byte after the magic ([`Trust::mode`](crate::Trust)) stands for.
fn protection(mode: &u8) -> String {
    match mode {
        0 => "no protection".to_owned(),
        1 => "a shared key".to_owned(),
        2 => "TLS".to_owned(),
        other => format!("unknown protection {other}"),
    }
}

/// Why the agent cannot do what is asked of it on this side.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option that makes no sense.
    ///
    /// What to do: set the option that the message names to what it asks for.
    #[error("{0}")]
    Options(String),
    /// The key or a certificate cannot be read or used.
    ///
    /// What to do: correct the file or value that the message names.
    #[error("{0}")]
    Key(String),
    /// Without a key only loopback is served.
    ///
    /// What to do: give a key or TLS certificates, or listen on a loopback address.
    #[error(
        "{0} can be reached from other machines, and there is no key to keep strangers out: give a \
         key, bind to a loopback address, or say 'insecure' if everyone on that network may read \
         and write this engine's memory"
    )]
    NeedsKey(SocketAddr),
    /// The operating system refuses.
    ///
    /// What to do: check what the message names: a port in use, or a limit on threads or files.
    #[error("{what}: {kind}")]
    Io {
        /// What was being done.
        what: String,
        /// What the system said.
        kind: io::ErrorKind,
    },
    /// The transport refuses.
    ///
    /// What to do: see the transport's error.
    #[error("{0}")]
    Transport(#[from] kvferry_transport::Error),
    /// A request of this name is under way.
    ///
    /// What to do: wait until it has ended and settled, or give the new request another name.
    #[error("request '{0}' is already under way")]
    Duplicate(String),
    /// The request has a lease.
    ///
    /// What to do: revoke the lease or wait for its end before granting another.
    #[error(transparent)]
    AlreadyGranted(#[from] AlreadyGranted),
    /// What is said of a request that is being computed does not go on from what was said before, or
    /// nobody wants it.
    ///
    /// What to do: as for the `NotGrown` that the message shows.
    #[error(transparent)]
    NotGrown(#[from] NotGrown),
    /// A block table names more blocks than the engine has.
    ///
    /// What to do: hand in the block table of this request and group, with every block once.
    #[error(
        "request '{request}': the table of group {group} names {named} blocks, but there are only {blocks}"
    )]
    TableTooLong {
        /// The request.
        request: String,
        /// The group.
        group: usize,
        /// Blocks that the table names.
        named: usize,
        /// Blocks of the group.
        blocks: u32,
    },
    /// The engine is being drained.
    ///
    /// What to do: send new requests to other engines; take the drain back (`kvferry drain --undo`) if
    /// this one is to stay.
    #[error("request '{0}' is not handed over: this engine is being drained")]
    Draining(String),
    /// What came through a router names an engine, but carries no seal, although this side holds a key.
    ///
    /// What to do: give the engine that is named the same key; if it has it, look for what removes `seal` from the
    /// transfer parameters on the way: a router must pass all of them on unchanged.
    #[error(
        "engine '{engine}' at {address} has not sealed this: it holds no key, or something on the way has \
         removed the seal. Give both engines the same key, and pass all parameters on unchanged"
    )]
    Unsealed {
        /// The engine that is named.
        engine: String,
        /// Where it is said to listen.
        address: String,
    },
    /// What came through a router is not what the engine that it names has sealed with this side's key.
    ///
    /// What to do: give both engines the same key; if they have it, somebody on the way (a client, a router) has
    /// changed the transfer parameters or made them up. Nothing was connected to.
    #[error(
        "this is not what engine '{engine}' at {address} has sealed: that engine holds another key, or somebody \
         on the way has changed it or made it up. Give both engines the same key, and pass all parameters on unchanged"
    )]
    Forged {
        /// The engine that is named.
        engine: String,
        /// Where it is said to listen.
        address: String,
    },
    /// The agent has stopped.
    ///
    /// What to do: do not use an agent after it was closed; start another.
    #[error("the agent has stopped")]
    Stopped,
    /// What was asked for needs another engine, and the connection to it could not be had, or ended.
    ///
    /// What to do: as for the `PeerError` that the message shows.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// The cards of an engine's ranks do not belong together.
    ///
    /// What to do: publish exactly one card of every rank, all from workers of this engine.
    #[error("{0}")]
    Cards(String),
}

impl From<getrandom::Error> for Error {
    fn from(error: getrandom::Error) -> Self {
        Self::Io { what: format!("drawing a random number: {error}"), kind: io::ErrorKind::Other }
    }
}
