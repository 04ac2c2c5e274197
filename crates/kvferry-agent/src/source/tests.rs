//! Who may give tasks to a rank, and about what.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_digest::{Digest, Key, Part, Program};
use kvferry_layout::{Manifest, Phase, Place, StateBox};
use kvferry_testkit::large::hundred_layers;
use kvferry_transport::Error;

use crate::background::Background;
use crate::rules::grant::Grant;
use crate::rules::lease::Loss;
use crate::source::relay::Relay;
use crate::wire::link::{Caller, Link};
use crate::wire::message::{Card, Question, Reply, ServiceCard};
use crate::wire::task::{Task, TaskReply, Token};
use crate::wire::ticket::Ticket;
use crate::wire::trust::Trust;
use crate::wire::version::Version;
use crate::{BlockTable, Carrier, Scheduler, SchedulerOptions, Source, Worker, WorkerOptions};

const TOKENS: u64 = 100;

/// Memory that is not there.
#[derive(Debug)]
struct Pretends;

impl Carrier for Pretends {
    fn name(&self) -> &'static str {
        "pretends"
    }

    fn describe(&self) -> Result<Vec<u8>, Error> {
        Ok(vec![])
    }

    fn connect(&self, _: &[u8], _: Instant) -> Result<Box<dyn Source>, Error> {
        Err(Error::Unsupported("nobody reads here".to_owned()))
    }

    fn digest(&self, program: &Program, deadline: Instant) -> Result<Vec<Digest>, Error> {
        assert!(deadline < Instant::now() + Duration::from_secs(3600), "a peer's word is a bound");
        Ok(vec![Digest::default(); program.parts()])
    }
}

struct World {
    scheduler: Scheduler,
    _worker: Worker,
    card: Card,
    background: Background,
}

impl World {
    fn new() -> Self {
        let mut draft = hundred_layers(4);
        draft.rank = 0;
        draft.engine = "p".to_owned();
        draft.regions.truncate(1);
        draft.groups.swap(0, 3);
        draft.groups.truncate(1);
        draft.groups[0].pieces.truncate(2);
        draft.regions[0].place = Place::Host;
        let carrier = Arc::new(Pretends);
        let manifest = Manifest::new(draft).unwrap();
        let worker = Worker::start(WorkerOptions::new(1), manifest, carrier).unwrap();
        let scheduler = Scheduler::start(SchedulerOptions::new("p")).unwrap();
        let card = worker.card().unwrap();
        scheduler.publish(vec![card.clone()]).unwrap();
        Self { scheduler, _worker: worker, card, background: Background::start("test").unwrap() }
    }

    fn ask(&self, address: &str, question: Question) -> Reply {
        let caller = Caller {
            who: "d".to_owned(),
            trust: Trust::Loopback,
            version: Version::CURRENT,
            reach: crate::wire::reach::Reach::Own,
            keepalive: Duration::from_secs(5),
        };
        let (tell, told) = std::sync::mpsc::channel();
        let address = address.to_owned();
        self.background.spawn(async move {
            let until = Instant::now() + Duration::from_secs(20);
            let link = Link::open(&address, &caller, until.into()).await.unwrap();
            tell.send(link.ask(question, until.into()).await.unwrap()).unwrap();
        });
        told.recv_timeout(Duration::from_secs(30)).unwrap()
    }
}

fn grant() -> Grant {
    Grant { epoch: 0, tokens: TOKENS, tables: vec![BlockTable { first: 0, blocks: vec![2] }] }
}

fn digest(entries: u64) -> Task {
    let part = Part {
        state: "model.layers.3/k".to_owned(),
        bounds: StateBox::new([0..8, 0..128]),
        phase: Phase::ALL,
        entries: (0..entries).into(),
    };
    Task::Digest { key: Key([1, 2]), parts: vec![part] }
}

fn about(ticket: &Ticket, grant: &Grant, task: Task) -> Question {
    Question::Ask {
        incarnation: ticket.incarnation,
        key: ticket.key(),
        read_by: grant.fingerprint(),
        rank: 0,
        patience_ms: 10_000,
        task,
    }
}

#[test]
fn a_task_is_done_under_its_lease_and_no_other() {
    let world = World::new();
    let ticket = world.scheduler.grant("r", grant()).unwrap();
    let scheduler = world.scheduler.address();
    let ask = |question| match world.ask(scheduler, question) {
        Reply::Task(reply) => reply,
        other => panic!("{other:?}"),
    };
    let good = ask(about(&ticket, &grant(), digest(TOKENS)));
    assert!(matches!(&good, TaskReply::Digests(digests) if digests.len() == 1), "{good:?}");

    let mut other = grant();
    other.tables[0].blocks[0] = 3;
    let not_granted = TaskReply::NotHeld(Loss::NotGranted);
    assert_eq!(ask(about(&ticket, &other, digest(TOKENS))), not_granted, "another block");
    let beyond = ask(about(&ticket, &grant(), digest(TOKENS + 1)));
    assert!(matches!(&beyond, TaskReply::Refused(why) if why.contains("100 tokens")), "{beyond:?}");
    let Question::Ask { incarnation, key, read_by, patience_ms, task, .. } =
        about(&ticket, &grant(), digest(1))
    else {
        unreachable!()
    };
    let no_rank = Question::Ask { incarnation, key, read_by, rank: 7, patience_ms, task };
    assert!(matches!(ask(no_rank), TaskReply::Refused(_)));
    let mut forged = ticket.clone();
    forged.nonce ^= 1;
    let unknown = TaskReply::NotHeld(Loss::Unknown);
    assert_eq!(ask(about(&forged, &grant(), digest(1))), unknown, "another lease");
    // Nor can a peer have a rank work, or wait, for as long as it likes: others come after it.
    let for_ever = |task| {
        let mut question = about(&ticket, &grant(), task);
        let Question::Ask { patience_ms, .. } = &mut question else { unreachable!() };
        *patience_ms = u64::MAX;
        ask(question)
    };
    assert!(matches!(for_ever(digest(1)), TaskReply::Digests(_)));
    let waits = for_ever(Task::Written { step: 9, known: 0 });
    assert!(matches!(waits, TaskReply::Refused(_)), "{waits:?}");
    let mut again = digest(TOKENS);
    let Task::Digest { parts, .. } = &mut again else { unreachable!() };
    let manifest = Manifest::from_bytes(&world.card.manifest).unwrap();
    let all: u64 = manifest.regions().iter().map(|region| region.bytes).sum();
    // Of two bytes each.
    let one = parts[0].bounds.volume() * 2 * TOKENS;
    *parts = vec![parts[0].clone(); (all / one) as usize + 1];
    let more = for_ever(again);
    assert!(
        matches!(&more, TaskReply::Refused(why) if why.contains("bytes to look at")),
        "{more:?}"
    );
    world.scheduler.revoke("r");
    let ended = ask(about(&ticket, &grant(), digest(1)));
    assert!(matches!(ended, TaskReply::NotHeld(Loss::Ended(_))), "{ended:?}");
}

#[test]
fn a_rank_takes_tasks_from_its_own_scheduler_alone() {
    let world = World::new();
    let service = world.card.service.clone().unwrap();
    let task = || Question::Do {
        token: Token([0; 16]),
        grant: grant(),
        patience_ms: 1000,
        task: digest(1),
    };
    let refused = world.ask(&service.address, task());
    assert!(
        matches!(&refused, Reply::Refused(why) if why.contains("own scheduler")),
        "{refused:?}"
    );
    let refused = world.ask(&service.address, Question::Status);
    assert!(matches!(refused, Reply::Refused(_)), "{refused:?}");
    let refused = world.ask(world.scheduler.address(), task());
    assert!(matches!(refused, Reply::Refused(_)), "{refused:?}");
    // What peers get to see of a card does not have the token in it.
    let shown = crate::wire::message::encode(&world.card);
    assert!(!shown.windows(16).any(|bytes| bytes == service.token.0));
    let carried = Card::from_bytes(&world.card.to_bytes()).unwrap();
    assert_eq!(carried, world.card, "its own scheduler does");
}

/// Where a rank listens is known to those beside it. Whoever is elsewhere has only the address for others, and never
/// gives a token to who is on its own machine.
#[test]
fn a_rank_is_asked_where_it_can_be() {
    let world = World::new();
    let service = world.card.service.clone().unwrap();
    let nowhere = "127.0.0.1:1".to_owned();
    let elsewhere = "another machine".to_owned();
    let relay = || {
        Relay::new(Caller {
            who: "p".to_owned(),
            trust: Trust::Loopback,
            version: Version::CURRENT,
            reach: crate::wire::reach::Reach::Own,
            keepalive: Duration::from_secs(5),
        })
    };
    let done = |relay: Relay, service: ServiceCard| {
        let (tell, told) = std::sync::mpsc::channel();
        world.background.spawn(async move {
            for _ in 0..2 {
                tell.send(relay.pass(&service, grant(), 10_000, digest(1)).await).unwrap();
            }
        });
        let replies = [(); 2].map(|()| told.recv_timeout(Duration::from_secs(30)).unwrap());
        assert_eq!(
            replies[0], replies[1],
            "the second without another try, or by the same connection"
        );
        replies[0].clone()
    };
    let advertised = ServiceCard { address: nowhere.clone(), ..service.clone() };
    assert!(matches!(done(relay(), advertised.clone()), TaskReply::Digests(_)));
    let fallback = ServiceCard { near: nowhere.clone(), ..service.clone() };
    assert!(matches!(done(relay(), fallback.clone()), TaskReply::Digests(_)));
    let gone = ServiceCard { near: nowhere, ..advertised };
    assert!(matches!(done(relay(), gone), TaskReply::Unable(why) if why.contains("127.0.0.1:1")));
    let other = ServiceCard { place: elsewhere, ..service };
    assert!(matches!(done(relay(), other), TaskReply::Unable(why) if why.contains("advertise")));
}
