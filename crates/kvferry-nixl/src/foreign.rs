//! Processes that use NIXL but know nothing of kvferry: how their memory is described for a
//! [`Nixl`](super::Nixl) transport to read, and how they are told something.

use std::ffi::{CStr, CString};

use kvferry_layout::Region;

use super::capi::{self, Agent, AgentError};
use super::peer::Description;
use super::{NixlOptions, find};
use kvferry_transport::shared::random::random;
use kvferry_transport::shared::spans::Spans;
use kvferry_transport::{Error, Instance};

/// A description of a process that uses NIXL by itself, for
/// [`Transport::connect`](kvferry_transport::Transport::connect): its NIXL metadata, the memory that it has
/// registered, and a name for it that no other process has, nor a later life of the same one.
pub fn describe_foreign(
    instance: Instance,
    regions: Vec<Region>,
    metadata: &[u8],
) -> Result<Vec<u8>, Error> {
    let spans = Spans::from_peer(regions)?;
    Ok(Description { instance, foreign: true, segments: None, spans, metadata, told: None }
        .encode())
}

/// Sends notifications to processes that use NIXL: an agent of its own, without any memory.
#[derive(Debug)]
pub struct Bell {
    agent: Agent,
}

impl Bell {
    /// Loads NIXL and makes an agent.
    pub fn new(options: &NixlOptions) -> Result<Self, Error> {
        let library = find::find_in(options.library.as_deref(), &options.site_packages)?;
        // SAFETY: who set this up chose the library, by an option, the environment or an installed package, as one
        // chooses any dependency.
        let nixl = unsafe { capi::Nixl::load(&library) }
            .map_err(|error| find::does_not_load(&library, &error))?;
        let name = format!("kvferry-bell-{}", Instance(random()?));
        let agent = Agent::new(&nixl, &name, &options.settings()).map_err(|error| match error {
            AgentError::Agent(code) => find::does_not_load(&library, &code),
            AgentError::Plugin(code) => find::no_plugin(&library, &options.plugin, &code),
            AgentError::Name => {
                Error::Unsupported("a parameter for NIXL holds a zero byte".to_owned())
            }
        })?;
        Ok(Self { agent })
    }

    /// Learns how to reach a process, from its NIXL metadata. Answers NIXL's name for it.
    pub fn meet(&self, metadata: &[u8]) -> Result<CString, Error> {
        self.agent.load(metadata).map_err(|code| {
            Error::BadDescription(format!("NIXL cannot load the peer's metadata: {code}"))
        })
    }

    /// Sends a message to a process that was met. Whether it arrives is not known.
    pub fn ring(&self, name: &CStr, message: &[u8]) -> Result<(), Error> {
        self.agent.notify(name, message).map_err(|code| Error::PeerLost(code.to_string()))
    }

    /// Forgets a process.
    pub fn forget(&self, name: &CStr) {
        // One that NIXL does not know is forgotten already.
        let _ = self.agent.forget(name);
    }
}
