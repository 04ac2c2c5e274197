//! What one side leaves for another, which fetches all of it or waits for the first.

use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::Mutex;

/// A queue that can be emptied, waited at with a deadline, and closed.
#[derive(Debug)]
pub(crate) struct Mailbox<T> {
    sender: Mutex<Option<Sender<T>>>,
    receiver: Receiver<T>,
}

impl<T> Default for Mailbox<T> {
    fn default() -> Self {
        let (sender, receiver) = unbounded();
        Self { sender: Mutex::new(Some(sender)), receiver }
    }
}

impl<T> Mailbox<T> {
    pub(crate) fn put(&self, one: T) {
        if let Some(sender) = &*self.sender.lock() {
            // The receiving end lives as long as this.
            _ = sender.send(one);
        }
    }

    /// What has come since the last call.
    pub(crate) fn take(&self) -> Vec<T> {
        self.receiver.try_iter().collect()
    }

    /// The same, but waits for the first of them until `until`, or until it is closed.
    pub(crate) fn wait(&self, until: Instant) -> Vec<T> {
        let first = self.receiver.recv_deadline(until).ok();
        first.into_iter().chain(self.receiver.try_iter()).collect()
    }

    /// Nothing more comes: whoever waits need not wait any longer.
    pub(crate) fn close(&self) {
        self.sender.lock().take();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn what_was_put_is_taken_once_and_in_order() {
        let mailbox = Mailbox::<i32>::default();
        (0..3).for_each(|n| mailbox.put(n));
        assert_eq!(mailbox.wait(Instant::now()), [0, 1, 2]);
        mailbox.put(3);
        assert_eq!(mailbox.take(), [3]);
        assert!(mailbox.wait(Instant::now()).is_empty());
    }

    #[test]
    fn a_wait_ends_with_what_comes_or_when_it_is_closed() {
        let mailbox = Mailbox::default();
        let began = Instant::now();
        thread::scope(|scope| {
            let waits = scope.spawn(|| mailbox.wait(began + LONG));
            mailbox.put(7);
            assert_eq!(waits.join().unwrap(), [7]);
            let waits = scope.spawn(|| mailbox.wait(began + LONG));
            mailbox.close();
            assert!(waits.join().unwrap().is_empty());
        });
        mailbox.put(8);
        assert!(mailbox.wait(began + LONG).is_empty(), "closed for good");
        assert!(began.elapsed() < LONG);
    }
}
