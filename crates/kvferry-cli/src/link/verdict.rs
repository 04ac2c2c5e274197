//! What is wrong with a link, and what to do about it.

use std::net::SocketAddr;

use super::words::{Came, End, Finding, Host, Measured, Report, Sent, What};

/// Of what plain sockets carry in the same run: less is slow, and less than the second not what was paid for.
const SLOW: f64 = 0.5;
const WRONG: f64 = 0.25;
/// Packets that were sent again, of a thousand: some are lost wherever a link is filled, and too many are lost otherwise.
const LOSSY: f64 = 1.0;
const TOO_LOSSY: f64 = 50.0;

/// All that is to be said of what was measured.
pub(super) fn findings(report: &Report) -> Vec<Finding> {
    let mut findings = vec![];
    if report.measured.iter().all(|one| one.step.what.transport().is_none()) {
        let says = "the two ends have no transport in common for their memory: plain sockets alone were tested";
        let advice = "see above what is left out, and why: give both the same '--transport', and install NIXL on both for the \
            memory of GPUs ('kvferry nixl install')";
        findings.push(finding("transport", true, says.to_owned(), advice));
    }
    for reader in End::BOTH {
        broken(report, reader, &mut findings);
        slow(report, reader, &mut findings);
        lossy(report, reader, &mut findings);
        translated(report, reader, &mut findings);
        if !report.host(reader).address.is_loopback() {
            interface(report, reader, &mut findings);
        }
    }
    findings
}

fn finding(what: &str, wrong: bool, says: String, advice: impl Into<String>) -> Finding {
    Finding { what: what.to_owned(), wrong, says, advice: advice.into() }
}

fn of(report: &Report, reader: End) -> impl Iterator<Item = &Measured> {
    report.measured.iter().filter(move |one| one.step.reader == reader)
}

/// What could not be measured, or came wrong: each transport once.
fn broken(report: &Report, reader: End, findings: &mut Vec<Finding>) {
    let (to, from) = (report.host(reader).address, report.host(reader.other()).address);
    let mut said = vec![];
    for Measured { step, came } in of(report, reader) {
        let by = step.what.transport().unwrap_or("plain sockets");
        let found = match came {
            Came::Unreachable { address, why } => unreachable(to, *address, by, why),
            Came::Failed(why) => {
                let small = of(report, reader).any(|one| matches!(one.came, Came::Trips { .. }));
                let mtu = match small || step.what.transport().is_none() {
                    true => format!(
                        ". Where small requests pass and large ones do not, a device on the way drops packets of {} bytes \
                         without saying so: lower the interface's MTU, or let ICMP 'fragmentation needed' through",
                        report.path.mtu
                    ),
                    false => String::new(),
                };
                let advice = "see whether the other host ran out of memory or threads, and whether the connection is cut on its way";
                let says = format!("{to} reads from {from} ({}): {why}", step.what);
                finding("failed", true, says, format!("{advice}{mtu}"))
            }
            Came::Corrupt { at, sent, came, wrong, of } => {
                let says = format!(
                    "{to} reads from {from} ({}): byte {at} was sent as {sent:#04x} and came as {came:#04x}, and {} of {} \
                     bytes are wrong",
                    step.what,
                    crate::text::number(*wrong),
                    crate::text::number(*of)
                );
                let advice = "start no engines over this link: something on it changes bytes and makes TCP's checksum fit, or \
                    memory is broken. Try the same hosts over another card or path, with 'ethtool -K INTERFACE rx off tx off', \
                    and without proxies and tunnels between them; test the memory of both";
                finding("corrupt", true, says, advice)
            }
            Came::Bytes { .. } | Came::Trips { .. } | Came::LeftOut(_) => continue,
        };
        if !said.contains(&by) {
            said.push(by);
            findings.push(found);
        }
    }
}

fn unreachable(to: std::net::IpAddr, address: Option<SocketAddr>, by: &str, why: &str) -> Finding {
    let Some(at) = address else {
        let says = format!("{to} cannot connect to the other host by {by}: {why}");
        let advice = "do what the message names. For nixl, UCX has not found a device that leads from one host to the other, or \
            its ports are closed: UCX_LOG_LEVEL=info on both sides says what it tries, UCX_NET_DEVICES and UCX_TCP_PORT_RANGE \
            name others. Without RDMA, use tcp";
        return finding("unreachable", true, says, advice);
    };
    let advice = format!(
        "let TCP connections from {to} to {at} through: a firewall between the two drops or refuses them, or address \
         translation leads elsewhere (then give '--advertise' on the host that is not reached). Ports are any free ones \
         (net.ipv4.ip_local_port_range) unless '--data-port' names some; engines choose theirs in the same way"
    );
    finding("unreachable", true, format!("{to} cannot connect to {at} ({by}): {why}"), advice)
}

/// The rate beside that of plain sockets.
fn slow(report: &Report, reader: End, findings: &mut Vec<Finding>) {
    let (to, from) = (report.host(reader), report.host(reader.other()));
    let carried = carried(report, reader);
    for transport in transports(report, reader) {
        let Some(rate) = rate(report, reader, transport) else { continue };
        let share = rate / carried;
        if !share.is_finite() || share >= SLOW {
            continue;
        }
        let says = format!(
            "{} reads from {} by {transport} at {} GB/s, where plain sockets carry {}: {share:.2} of it",
            to.address,
            from.address,
            crate::text::figures(rate),
            crate::text::figures(carried)
        );
        let advice = match transport {
            "nixl" => {
                "UCX has chosen a path in software: see UCX_NET_DEVICES and UCX_TLS, and in a container /dev/infiniband and \
                 'ulimit -l'. UCX_LOG_LEVEL=info on both sides says what it chose. Without RDMA, use tcp"
            }
            _ => {
                "the cores of one host are busy or few: look at 'top' on both while this runs, and at the CPU limits of \
                 containers; then run this again"
            }
        };
        findings.push(finding("rate", share < WRONG, says, advice));
    }
}

fn carried(report: &Report, reader: End) -> f64 {
    let sockets = of(report, reader).filter(|one| one.step.what.transport().is_none());
    sockets.filter_map(gb_per_s).fold(0.0, f64::max)
}

/// The best of long runs.
fn rate(report: &Report, reader: End, transport: &str) -> Option<f64> {
    let long = of(report, reader).filter(|one| match &one.step.what {
        What::Read { transport: by, run } => by == transport && *run >= 64 << 10,
        _ => false,
    });
    long.filter_map(gb_per_s).reduce(f64::max)
}

fn transports(report: &Report, reader: End) -> Vec<&str> {
    let mut names: Vec<&str> =
        of(report, reader).filter_map(|one| one.step.what.transport()).collect();
    names.dedup();
    names
}

fn gb_per_s(measured: &Measured) -> Option<f64> {
    match measured.came {
        Came::Bytes { gb_per_s, .. } => Some(gb_per_s),
        _ => None,
    }
}

/// What was sent again, by the end that is read.
fn lossy(report: &Report, reader: End, findings: &mut Vec<Finding>) {
    let sender = report.host(reader.other()).address;
    let Sent { segments, retransmitted } = match reader {
        End::Tester => report.sent_by_listener,
        End::Listener => report.sent_by_tester,
    };
    let of_thousand = 1e3 * retransmitted as f64 / segments.max(1) as f64;
    if of_thousand < LOSSY || retransmitted < 20 {
        return;
    }
    let says = format!(
        "{sender} had to send {} of {} packets again over plain sockets: {} %",
        crate::text::number(retransmitted),
        crate::text::number(segments),
        crate::text::figures(of_thousand / 10.0)
    );
    let advice = "look for errors and drops with 'ethtool -S INTERFACE' on both hosts and at the switches, for a policer on \
        the way, and for too small buffers (net.core.netdev_max_backlog, ring sizes)";
    findings.push(finding("loss", of_thousand >= TOO_LOSSY, says, advice));
}

/// Who is seen at another address than at the one that it gives to others.
fn translated(report: &Report, end: End, findings: &mut Vec<Finding>) {
    let said = report.host(end).address;
    let (seen, role) = match end {
        End::Tester => (report.tester_seen_at, "tester"),
        End::Listener => (report.listener_seen_at, "listener"),
    };
    if said != seen {
        let says = format!(
            "the {role} is read at {said}, and the other end sees it at {seen}: addresses are translated"
        );
        let advice = "where it is not reached at the first, give it the second by '--advertise', and its engines by the option \
            'advertise'; ports must lead to the same ports";
        findings.push(finding("address", false, says, advice));
    }
}

/// The interface that is used, beside what the host has.
fn interface(report: &Report, end: End, findings: &mut Vec<Finding>) {
    let Host { address, interface, fastest_other, .. } = report.host(end);
    let Some(used) = interface else { return };
    if let (Some(speed), Some(other)) = (used.megabits, fastest_other)
        && let Some(faster) = other.megabits.filter(|&faster| faster >= 2 * speed)
    {
        // RDMA goes its own way, whatever address it is asked for at.
        let rdma = ["nixl"].into_iter().filter_map(|by| rate(report, end, by)).fold(0.0, f64::max);
        let elsewhere = 8e3 * rdma > speed as f64;
        let says = format!(
            "{address} is at {}, with {}; this host has {}, with {}",
            used.name,
            gigabits(speed),
            other.name,
            gigabits(faster)
        );
        let advice = format!(
            "use an address of {} on this host: for this test, and as the option 'host' of the engines",
            other.name
        );
        findings.push(finding("interface", !elsewhere, says, advice));
    }
    if let Some(mtu) = used.mtu.filter(|&mtu| report.path.mtu > 0 && mtu > report.path.mtu) {
        let says = format!(
            "packets of {} bytes pass between the two, and {} at {address} is set to {mtu}",
            report.path.mtu, used.name
        );
        let advice = "for long packets set the same MTU on both hosts and on every switch between them; otherwise it does no harm";
        findings.push(finding("mtu", false, says, advice));
    }
}

/// `25 Gbit/s`.
pub(super) fn gigabits(megabits: u64) -> String {
    format!("{} Gbit/s", crate::text::figures(megabits as f64 / 1e3))
}

#[cfg(test)]
mod tests {
    use super::super::words::{Interface, Path, RUNS, Step};
    use super::*;

    /// A link on which all is well, at 10 Gbit/s.
    fn report() -> Report {
        let card = |name: &str| Interface {
            name: name.to_owned(),
            megabits: Some(10_000),
            mtu: Some(1500),
        };
        let host = |last: u8| Host {
            address: [10, 0, 0, last].into(),
            memory: "host".to_owned(),
            interface: Some(card("eth0")),
            fastest_other: Some(card("eth1")),
        };
        let bytes =
            |gb_per_s| Came::Bytes { bytes: 1 << 30, seconds: 1.0, gb_per_s, packed: false };
        let mut measured = vec![];
        for reader in End::BOTH {
            let mut add = |what, came| {
                measured.push(Measured { step: Step { reader, what, milliseconds: 0 }, came });
            };
            add(What::Sockets { connections: 1 }, bytes(1.1));
            for transport in ["tcp", "nixl"] {
                let transport = || transport.to_owned();
                let trips = Came::Trips { count: 9, median_us: 50.0, worst_us: 90.0 };
                add(What::RoundTrips { transport: transport() }, trips);
                for run in RUNS {
                    add(What::Read { transport: transport(), run }, bytes(1.0));
                }
            }
        }
        let (tester, listener) = (host(7), host(5));
        let sent = Sent { segments: 1_000_000, retransmitted: 3 };
        Report {
            works: true,
            tester_seen_at: tester.address,
            listener_seen_at: listener.address,
            tester,
            listener,
            path: Path { mtu: 1500, segment: 1448, round_trip_us: 40 },
            sent_by_tester: sent,
            sent_by_listener: sent,
            measured,
            left_out: vec![],
            findings: vec![],
        }
    }

    /// The one thing that is found when a good link is changed like this: whether it is wrong, and what is said of it.
    fn found(change: impl FnOnce(&mut Report)) -> (String, bool, String) {
        let mut report = report();
        change(&mut report);
        let findings = findings(&report);
        let [Finding { what, wrong, says, advice }] = &findings[..] else { panic!("{findings:?}") };
        assert!(!advice.is_empty());
        (what.clone(), *wrong, says.clone())
    }

    fn came(report: &mut Report, transport: &str, what: impl Fn(u64) -> Option<Came>) {
        for one in &mut report.measured {
            if let What::Read { transport: by, run } = &one.step.what
                && by == transport
                && one.step.reader == End::Tester
                && let Some(came) = what(*run)
            {
                one.came = came;
            }
        }
    }

    #[test]
    fn nothing_is_said_of_a_link_on_which_all_is_well() {
        assert_eq!(findings(&report()), []);
    }

    #[test]
    fn slow_paths() {
        let rate = |gb_per_s| Came::Bytes { bytes: 1, seconds: 1.0, gb_per_s, packed: false };
        let (what, wrong, says) = found(|it| came(it, "nixl", |_| Some(rate(0.1))));
        assert_eq!((what.as_str(), wrong), ("rate", true));
        assert_eq!(
            says,
            "10.0.0.7 reads from 10.0.0.5 by nixl at 0.1 GB/s, where plain sockets carry 1.1: 0.09 of it"
        );
        assert!(!found(|it| came(it, "tcp", |_| Some(rate(0.4)))).1);
        // Short runs are slow on every path.
        let mut short = report();
        came(&mut short, "tcp", |run| (run < 3000).then(|| rate(0.1)));
        assert_eq!(findings(&short), []);
    }

    #[test]
    fn other_interfaces_and_packets() {
        let faster = Interface { name: "eth9".to_owned(), megabits: Some(100_000), mtu: None };
        let (what, wrong, says) = found(|it| it.listener.fastest_other = Some(faster.clone()));
        assert_eq!((what.as_str(), wrong), ("interface", true));
        assert_eq!(
            says,
            "10.0.0.5 is at eth0, with 10 Gbit/s; this host has eth9, with 100 Gbit/s"
        );
        // What is read by RDMA does not go through it.
        let rdma = Came::Bytes { bytes: 1, seconds: 1.0, gb_per_s: 10.0, packed: false };
        let by_rdma = found(|it| {
            it.tester.fastest_other = Some(faster.clone());
            came(it, "nixl", |_| Some(rdma.clone()));
        });
        assert!(!by_rdma.1, "{by_rdma:?}");
        let long = Interface { name: "eth0".to_owned(), megabits: Some(10_000), mtu: Some(9000) };
        let (what, wrong, says) = found(|it| it.tester.interface = Some(long));
        assert_eq!((what.as_str(), wrong), ("mtu", false));
        assert_eq!(
            says,
            "packets of 1500 bytes pass between the two, and eth0 at 10.0.0.7 is set to 9000"
        );
    }

    #[test]
    fn losses_and_other_addresses() {
        let lost = |retransmitted| {
            found(|it| it.sent_by_listener = Sent { segments: 100_000, retransmitted })
        };
        let (what, wrong, says) = lost(8000);
        assert_eq!((what.as_str(), wrong), ("loss", true));
        assert_eq!(
            says,
            "10.0.0.5 had to send 8 000 of 100 000 packets again over plain sockets: 8 %"
        );
        assert!(!lost(2000).1);
        let (what, wrong, says) = found(|it| it.tester_seen_at = [192, 0, 2, 1].into());
        assert_eq!((what.as_str(), wrong), ("address", false));
        assert!(says.contains("10.0.0.7") && says.contains("192.0.2.1"), "{says}");
    }

    #[test]
    fn what_breaks_is_said_once_for_each_transport_and_direction() {
        let (what, wrong, says) = found(|it| {
            came(it, "tcp", |run| match run {
                2048 => Some(Came::Corrupt { at: 7, sent: 1, came: 3, wrong: 1, of: 2048 }),
                _ => Some(Came::LeftOut("it failed before".to_owned())),
            });
        });
        assert_eq!((what.as_str(), wrong), ("corrupt", true));
        assert_eq!(
            says,
            "10.0.0.7 reads from 10.0.0.5 (tcp, runs of 2 KiB): byte 7 was sent as 0x01 and came as 0x03, and 1 of 2 048 \
             bytes are wrong"
        );
        let (what, _, says) = found(|it| {
            let address = Some(([10, 0, 0, 5], 40_000).into());
            came(it, "nixl", |_| Some(Came::Unreachable { address, why: "timed out".to_owned() }));
        });
        assert_eq!(what, "unreachable");
        assert_eq!(says, "10.0.0.7 cannot connect to 10.0.0.5:40000 (nixl): timed out");
        let mut broken = report();
        came(&mut broken, "tcp", |_| Some(Came::Failed("the deadline passed".to_owned())));
        let said = findings(&broken);
        assert_eq!((said.len(), said[0].what.as_str()), (1, "failed"));
        assert!(said[0].advice.contains("1500 bytes without saying so"), "{}", said[0].advice);
    }
}
