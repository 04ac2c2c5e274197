//! The scheduler's way to the ranks of its own engine.

use std::time::{Duration, Instant};

use crate::rules::grant::Grant;
use crate::wire::link::{Caller, Links};
use crate::wire::message::{Question, Reply, ServiceCard};
use crate::wire::task::{Task, TaskReply};

/// Nobody waits longer for a task than this, whatever a peer says.
const LONGEST: Duration = Duration::from_secs(600);

/// Connections to the ranks, opened when they are needed.
#[derive(Debug)]
pub(crate) struct Relay(Links);

impl Relay {
    pub(crate) fn new(caller: Caller) -> Self {
        Self(Links::new(caller))
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
        let deadline = (Instant::now() + patience).into();
        let asked = async {
            let link = self.0.get(&service.address, deadline).await?;
            let token = service.token;
            link.ask(Question::Do { token, grant, patience_ms, task }, deadline).await
        };
        match asked.await {
            Ok(Reply::Task(reply)) => reply,
            Ok(Reply::Refused(reason)) => TaskReply::Refused(reason),
            Ok(_) => TaskReply::Gone("it gives an answer that does not fit the task".to_owned()),
            Err(error) => TaskReply::Gone(error.to_string()),
        }
    }
}
