//! The scheduler's way to the ranks of its own engine.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::warn;

use super::service::place;
use crate::rules::grant::Grant;
use crate::wire::link::{Caller, Link, Links};
use crate::wire::message::{Question, Reply, ServiceCard};
use crate::wire::task::{Task, TaskReply, Token};
use crate::wire::trust::Trust;

/// Nobody waits longer for a task than this, whatever a peer says.
const LONGEST: Duration = Duration::from_secs(600);
/// Nor longer than this for the connection. Whoever asks goes on without.
const CONNECTING: Duration = Duration::from_secs(2);
/// A rank that cannot be reached is not tried again for so long: every request would wait for it.
const PAUSE: Duration = Duration::from_secs(30);

/// Connections to the ranks, opened when they are needed.
#[derive(Debug)]
pub(crate) struct Relay {
    links: Links,
    /// Certificates name the address that others are given.
    by_name: bool,
    place: String,
    /// The ranks that cannot be reached: until when they are not tried, and why.
    unreachable: Mutex<HashMap<Token, (Instant, String)>>,
}

impl Relay {
    pub(crate) fn new(caller: Caller) -> Self {
        let by_name = matches!(caller.trust, Trust::Tls(_));
        let (links, unreachable) = (Links::new(caller), Mutex::default());
        Self { links, by_name, place: place(), unreachable }
    }

    /// Has a rank do a task with what was granted.
    pub(crate) async fn pass(
        &self,
        service: &ServiceCard,
        grant: Grant,
        patience_ms: u64,
        task: Task,
    ) -> TaskReply {
        let patience = Duration::from_millis(patience_ms).min(LONGEST);
        let deadline = Instant::now() + patience;
        let link = match self.reach(service, deadline).await {
            Ok(link) => link,
            Err(reason) => return TaskReply::Unable(reason),
        };
        let (token, patience_ms) = (service.token, patience.as_millis() as u64);
        let asked = link.ask(Question::Do { token, grant, patience_ms, task }, deadline.into());
        match asked.await {
            Ok(Reply::Task(reply)) => reply,
            Ok(Reply::Refused(reason)) => TaskReply::Refused(reason),
            Ok(_) => TaskReply::Gone("it gives an answer that does not fit the task".to_owned()),
            Err(error) => TaskReply::Gone(error.to_string()),
        }
    }

    async fn reach(&self, service: &ServiceCard, deadline: Instant) -> Result<Link, String> {
        if let Some((until, reason)) = self.unreachable.lock().get(&service.token)
            && Instant::now() < *until
        {
            return Err(reason.clone());
        }
        let mut reasons = vec![];
        for address in self.ways(service) {
            let now = Instant::now();
            let until = now + CONNECTING.min(deadline.saturating_duration_since(now) / 2);
            match self.links.get(address, until.into()).await {
                Ok(link) => return Ok(link),
                Err(error) => reasons.push(format!("{address}: {error}")),
            }
        }
        if reasons.is_empty() {
            let reason = "is on another machine, and its address leads to that machine only: set `advertise` there";
            reasons.push(format!("{} {reason}", service.address));
        }
        let reason = format!("its engine cannot reach it ({})", reasons.join("; "));
        warn!(
            reason,
            "a rank cannot be reached for tasks: readers cannot audit what they read from it"
        );
        let mut unreachable = self.unreachable.lock();
        unreachable.retain(|_, (until, _)| Instant::now() < *until);
        unreachable.insert(service.token, (Instant::now() + PAUSE, reason.clone()));
        Err(reason)
    }

    /// The addresses at which a rank may be, the best first. Never one that leads to somebody else: whoever is asked
    /// gets the token.
    fn ways<'a>(&self, service: &'a ServiceCard) -> Vec<&'a str> {
        let (near, far) = (&*service.near, &*service.address);
        let loopback = far.parse::<SocketAddr>().is_ok_and(|address| address.ip().is_loopback());
        match self.place == service.place {
            true if near == far => vec![near],
            true if self.by_name => vec![far, near],
            true => vec![near, far],
            false if loopback => vec![],
            false => vec![far],
        }
    }
}
