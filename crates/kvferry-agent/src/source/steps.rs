//! What a rank has written in the step that it computes: told to those who read it meanwhile.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use crate::wire::task::TaskReply;

/// Engines plan so many steps ahead at most.
const AHEAD: u64 = 4;

/// The step that a rank is in.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    present: watch::Sender<Step>,
    /// The latest step that somebody asked about.
    asked: AtomicU64,
}

#[derive(Debug, Default)]
struct Step {
    /// Its number; 0 before the first.
    number: u64,
    /// All of it is written.
    over: bool,
    /// States that are, in the order in which they were.
    written: Vec<String>,
}

impl Steps {
    /// A step begins, so all before it are over. One that came before changes nothing.
    pub(crate) fn begin(&self, number: u64) {
        self.present.send_if_modified(|step| {
            let later = number > step.number;
            if later {
                *step = Step { number, ..Step::default() };
            }
            later
        });
    }

    /// It has written all that it writes of these states. Of another step than the present one that is not
    /// news.
    pub(crate) fn wrote(&self, number: u64, states: impl IntoIterator<Item = String>) {
        self.present.send_if_modified(|step| {
            let now = number == step.number;
            if now {
                step.written.extend(states);
            }
            now
        });
    }

    /// It has written everything.
    pub(crate) fn end(&self, number: u64) {
        self.present.send_if_modified(|step| {
            let now = number == step.number;
            step.over |= now;
            now
        });
    }

    /// Whether anybody waits for what a step writes, or has just been told of some and will ask for more.
    pub(crate) fn is_heard(&self, number: u64) -> bool {
        self.present.receiver_count() > 0
            || (number > 0 && self.asked.load(Ordering::Relaxed) >= number)
    }

    /// What is written in a step beyond so many states, as soon as there is any. After a while that is
    /// nothing.
    pub(crate) async fn written(&self, number: u64, known: u32, patience: Duration) -> TaskReply {
        let known = known as usize;
        let news = |step: &Step| {
            step.number > number
                || (step.number == number && (step.over || step.written.len() > known))
        };
        let mut steps = self.present.subscribe();
        // Whoever asks about a step that is far ahead is not listened to for that long.
        let near = self.present.borrow().number.saturating_add(AHEAD);
        self.asked.fetch_max(number.min(near), Ordering::Relaxed);
        _ = timeout(patience, steps.wait_for(news)).await;
        let step = self.present.borrow();
        let over = step.number > number || (step.number == number && step.over);
        let states = match step.number == number {
            true => step.written.get(known..).unwrap_or_default().to_vec(),
            false => vec![],
        };
        TaskReply::Written { states, over }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(60);

    async fn ask(steps: &Steps, number: u64, known: u32, patience: Duration) -> (String, bool) {
        match steps.written(number, known, patience).await {
            TaskReply::Written { states, over } => (states.join(" "), over),
            other => panic!("{other:?}"),
        }
    }

    fn states(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[tokio::test]
    async fn whatever_is_new_of_a_step_is_told() {
        let steps = Steps::default();
        assert_eq!(ask(&steps, 4, 0, SOON).await, (String::new(), false), "it has not begun");
        steps.begin(4);
        assert_eq!(ask(&steps, 4, 0, SOON).await, (String::new(), false));
        steps.wrote(4, states(&["a", "b"]));
        assert_eq!(ask(&steps, 4, 0, LONG).await, ("a b".to_owned(), false));
        assert_eq!(ask(&steps, 4, 1, LONG).await, ("b".to_owned(), false));
        assert_eq!(ask(&steps, 4, 2, SOON).await, (String::new(), false));
        assert_eq!(ask(&steps, 5, 0, SOON).await, (String::new(), false), "that is another one");
        steps.wrote(3, states(&["c"]));
        steps.wrote(5, states(&["c"]));
        assert_eq!(ask(&steps, 4, 2, SOON).await, (String::new(), false), "of other steps");
        steps.end(4);
        assert_eq!(ask(&steps, 4, 2, LONG).await, (String::new(), true));
        assert_eq!(ask(&steps, 4, 9, LONG).await, (String::new(), true), "more than there are");
        steps.begin(6);
        steps.begin(5);
        assert_eq!(ask(&steps, 5, 0, LONG).await, (String::new(), true));
        assert_eq!(ask(&steps, 6, 0, SOON).await, (String::new(), false));
        steps.end(5);
        assert_eq!(ask(&steps, 6, 0, SOON).await, (String::new(), false));
    }

    #[tokio::test]
    async fn whoever_waits_is_told_at_once() {
        let steps = std::sync::Arc::new(Steps::default());
        let waiting = tokio::spawn({
            let steps = steps.clone();
            async move { ask(&steps, 1, 0, LONG).await }
        });
        assert!(!steps.is_heard(1));
        tokio::task::yield_now().await;
        assert!(steps.is_heard(1));
        steps.begin(1);
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        steps.wrote(1, states(&["a"]));
        assert_eq!(waiting.await.unwrap(), ("a".to_owned(), false));
        assert!(steps.is_heard(1), "who has heard of a step asks for more of it");
        assert!(!steps.is_heard(2) && !steps.is_heard(0));
        assert_eq!(ask(&steps, u64::MAX, 0, SOON).await, (String::new(), false));
        assert!(steps.is_heard(1 + AHEAD) && !steps.is_heard(2 + AHEAD));
    }
}
