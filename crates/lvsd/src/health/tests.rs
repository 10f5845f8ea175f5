use std::sync::Mutex;

use super::*;
use crate::config::{Config, checks_of};

/// A prober that succeeds unless a test sets another result, and that records its calls.
#[derive(Clone, Default)]
struct Well {
    down: Arc<Mutex<bool>>,
    asked: Arc<Mutex<Vec<Instant>>>,
}

impl Prober for Well {
    async fn probe(&self, _: &Check) -> Result<Advice, ProbeError> {
        self.asked.lock().unwrap().push(Instant::now());
        match *self.down.lock().unwrap() {
            true => Err(ProbeError::server("refused")),
            false => Ok(Advice::NONE),
        }
    }
}

fn config(services: &[(u8, &str)]) -> Config {
    let mut text = String::new();
    for (n, check) in services {
        text.push_str(&format!(
            "[[service]]\naddress = \"192.0.2.{n}:80\"\nforward = \"nat\"\ncheck = {{ {check}, via = \"server\" }}\n\
             [[service.server]]\naddress = \"10.0.0.1:80\"\n"
        ));
    }
    let (config, _) =
        Config::from_toml("test.toml", &text).unwrap_or_else(|report| panic!("{report}"));
    config
}

fn keys(config: &Config) -> Vec<Key> {
    let services = config.services.iter();
    services
        .map(|service| (service.id, service.servers[0].address))
        .collect()
}

fn health(checks: &Checks<Well>, config: &Config) -> Vec<Health> {
    let keys = keys(config);
    keys.iter().map(|key| checks.health(key)).collect()
}

#[tokio::test(start_paused = true)]
async fn check_state_is_kept_by_reload_only_for_same_probe_of_same_server() {
    use Health::{Unknown, Up};
    let (mut checks, mut reports) = Checks::new(Well::default(), None);
    let tcp = "type = \"tcp\"";
    let first = config(&[(1, tcp)]);
    checks.set(checks_of(&first.services));
    assert_eq!(health(&checks, &first), [Unknown]);
    let report = reports.recv().await.expect("the check reports a result");
    checks.take(report);
    assert_eq!(health(&checks, &first), [Up]);

    // Another interval and another service use the same probe; another port does not.
    let second = config(&[
        (1, "type = \"tcp\", interval = \"9s\""),
        (2, tcp),
        (3, "type = \"tcp\", port = 81"),
    ]);
    checks.set(checks_of(&second.services));
    assert_eq!(health(&checks, &second), [Up, Up, Unknown]);

    // The same server and port with another check.
    let third = config(&[(1, "type = \"banner\", expect = \"220\"")]);
    checks.set(checks_of(&third.services));
    assert_eq!(health(&checks, &third), [Unknown]);
}

/// A prober that records whether each check goes through the service.
#[derive(Clone, Default)]
struct Paths {
    through: Arc<Mutex<Vec<bool>>>,
    /// Whether the dataplane drops the packets of checks.
    drops: Arc<Mutex<bool>>,
    /// Whether checks through the service fail, and those of the server's own address.
    fail: Arc<Mutex<[bool; 2]>>,
}

impl Paths {
    fn take(&self) -> Vec<bool> {
        std::mem::take(&mut self.through.lock().unwrap())
    }
}

impl Prober for Paths {
    async fn probe(&self, check: &Check) -> Result<Advice, ProbeError> {
        self.through.lock().unwrap().push(check.via.is_some());
        if check.via.is_some() && *self.drops.lock().unwrap() {
            tokio::time::sleep(check.timeout).await;
            return Err(ProbeError::Local("dropped".to_owned()));
        }
        let [service, own] = *self.fail.lock().unwrap();
        match check.via {
            Some(_) if service => Err(ProbeError::server("no answer through the VIP")),
            None if own => Err(ProbeError::server("refused")),
            _ => Ok(Advice::NONE),
        }
    }
}

const BY_DEFAULT: &str = "[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\n\
    check = { type = \"tcp\", interval = \"1s\", timeout = \"1s\", jitter = 0 }\nservers = [\"10.0.0.1:80\"]\n";

/// Starts the check of the only server of the configuration `text`, and waits until the server is
/// up.
async fn one_up<P: Prober>(
    prober: P,
    text: &str,
) -> (Checks<P>, mpsc::UnboundedReceiver<Report>, Key) {
    let (mut checks, mut reports) = Checks::new(prober, None);
    let (config, _) = Config::from_toml("test.toml", text).expect("the configuration is valid");
    let key = keys(&config)[0];
    checks.take_serving(Serving::default());
    checks.set(checks_of(&config.services));
    let report = reports.recv().await.expect("the check reports a result");
    assert!(checks.take(report).changes[0].up);
    (checks, reports, key)
}

#[tokio::test(start_paused = true)]
async fn server_that_fails_only_on_the_path_of_clients_stays_up_with_the_reason() {
    let paths = Paths::default();
    let (mut checks, mut reports, key) = one_up(paths.clone(), BY_DEFAULT).await;
    for (fail, fault) in [
        ([true, false], true),
        ([false, false], false),
        ([true, false], true),
        ([false, true], false),
    ] {
        *paths.fail.lock().unwrap() = fail;
        tokio::time::sleep(Duration::from_secs(5)).await;
        let reason = checks.client_path(&key).map(|reason| reason.text);
        let expected = fault.then(|| "no answer through the VIP".to_owned());
        assert_eq!(reason, expected, "{fail:?}");
        assert!(reports.try_recv().is_err(), "the server was reported down");
    }
    // Another director takes the VIP over, and checks the path.
    *paths.fail.lock().unwrap() = [true, false];
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(checks.client_path(&key).is_some());
    for (vips, fault) in [(Some(BTreeSet::new()), false), (None, true)] {
        checks.take_serving(Serving {
            vips,
            ..Serving::default()
        });
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(checks.client_path(&key).is_some(), fault);
    }
    *paths.fail.lock().unwrap() = [true, true];
    let report = reports.recv().await.expect("the check reports a result");
    let change = checks
        .take(report)
        .changes
        .pop()
        .expect("the server changes its state");
    assert!(!change.up);
    assert_eq!(change.reason.text, "no answer through the VIP");
    assert_eq!(checks.client_path(&key), None);
}

#[tokio::test(start_paused = true)]
async fn first_failed_check_on_the_path_of_clients_is_repeated_at_fast_interval() {
    let paths = Paths::default();
    let text = BY_DEFAULT.replace(
        "\"1s\", timeout",
        "\"100s\", fast_interval = \"1s\", timeout",
    );
    let (checks, _reports, key) = one_up(paths.clone(), &text).await;
    tokio::time::sleep(Duration::from_secs(150)).await;
    *paths.fail.lock().unwrap() = [true, false];
    paths.take();
    // The first check starts at a random time.
    for _ in 0..120 {
        if checks.client_path(&key).is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    tokio::time::sleep(Duration::from_secs(50)).await;
    let asked = paths.take();
    assert!(checks.client_path(&key).is_some(), "{asked:?}");
    assert_eq!(
        asked.len(),
        4,
        "a suspicious server is checked as often as before"
    );
}

#[tokio::test(start_paused = true)]
async fn server_taken_out_by_passive_check_stays_down_while_the_path_of_clients_fails() {
    let paths = Paths::default();
    let text = BY_DEFAULT.replace("jitter", "passive = true, jitter");
    let (mut checks, mut reports, key) = one_up(paths.clone(), &text).await;
    *paths.fail.lock().unwrap() = [true, false];
    tokio::time::sleep(Duration::from_secs(5)).await;
    let fault = Reason::from("no answer").of(Code::ClientPath);
    checks.take_out(&key, fault.with_fix("repair it".to_owned()));
    let report = reports.recv().await.expect("the check reports a result");
    let down = checks.take(report).changes.remove(0);
    assert!(!down.up);
    assert_eq!(down.reason.code, Code::ClientPath);
    assert_eq!(down.reason.to_string(), "no answer (passive) (repair it)");
    tokio::time::sleep(Duration::from_secs(200)).await;
    // The checks name the cause, the first reason only the effect.
    while let Ok(report) = reports.try_recv() {
        assert!(checks.take(report).changes.is_empty());
    }
    let reason = checks.known(&key).expect("the server is checked").reason;
    assert!(reason.text.ends_with("(passive)") && reason.text != "no answer (passive)");
    // The dataplane restarts: the director cannot check the path of clients for a while.
    *paths.drops.lock().unwrap() = true;
    tokio::time::sleep(Duration::from_secs(100)).await;
    assert!(
        checks.client_path(&key).is_some(),
        "the fault was forgotten"
    );
    *paths.drops.lock().unwrap() = false;
    tokio::time::sleep(Duration::from_secs(40)).await;
    assert!(reports.try_recv().is_err(), "the server was reported up");
    *paths.fail.lock().unwrap() = [false, false];
    tokio::time::sleep(Duration::from_secs(10)).await;
    while let Ok(report) = reports.try_recv() {
        checks.take(report);
    }
    assert_eq!(checks.health(&key), Health::Up);
    // Later, the server is down for another reason, and returns although its path fails.
    for (fail, health) in [([true, true], Health::Down), ([true, false], Health::Up)] {
        *paths.fail.lock().unwrap() = fail;
        tokio::time::sleep(Duration::from_secs(10)).await;
        while let Ok(report) = reports.try_recv() {
            checks.take(report);
        }
        assert_eq!(checks.health(&key), health);
    }
}

/// A prober whose checks through the service fail, because this host drops their replies.
struct Strict;

impl Prober for Strict {
    async fn probe(&self, check: &Check) -> Result<Advice, ProbeError> {
        if check.via.is_none() {
            return Ok(Advice::NONE);
        }
        tokio::time::sleep(check.timeout).await;
        let reason = Reason::from("rp_filter");
        Err(ProbeError::Server(reason.of(Code::ReversePath)))
    }
}

#[tokio::test(start_paused = true)]
async fn server_whose_replies_rp_filter_of_this_host_drops_is_not_suspicious() {
    let (checks, mut reports, key) = one_up(Strict, BY_DEFAULT).await;
    tokio::time::sleep(Duration::from_secs(100)).await;
    assert_eq!(checks.client_path(&key), None);
    let known = checks.known(&key).expect("the server is checked");
    let record = known.record.expect("a check was made");
    assert_eq!(record.own_address, "rp_filter");
    assert!(reports.try_recv().is_err(), "the server was reported down");
}

/// The server is not at fault: for example, a flood has filled the connection table.
#[tokio::test(start_paused = true)]
async fn check_dropped_by_dataplane_uses_own_address_of_server() {
    let paths = Paths::default();
    *paths.drops.lock().unwrap() = true;
    let (checks, mut reports, key) = one_up(paths.clone(), BY_DEFAULT).await;
    tokio::time::sleep(Duration::from_secs(20)).await;
    let through = paths.take();
    assert!(
        through.len() > 10 && !through[1..].contains(&true),
        "{through:?}"
    );
    let own_address = |checks: &Checks<Paths>| {
        let known = checks.known(&key).expect("the server is checked");
        known.record.expect("a check was made").own_address
    };
    assert_eq!(own_address(&checks), "dropped");
    *paths.drops.lock().unwrap() = false;
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(
        paths.take().last(),
        Some(&true),
        "the last check was not a through-VIP check"
    );
    assert_eq!(own_address(&checks), "");
    assert!(reports.try_recv().is_err(), "the server was reported down");
}

#[tokio::test(start_paused = true)]
async fn check_without_via_goes_through_the_service_only_while_this_director_has_the_vip() {
    let paths = Paths::default();
    let (mut checks, _reports) = Checks::new(paths.clone(), None);
    let (config, _) =
        Config::from_toml("test.toml", BY_DEFAULT).expect("the configuration is valid");
    checks.set(checks_of(&config.services));
    let vips = |vips: &[&str]| Serving {
        vips: Some(vips.iter().map(|vip| vip.parse().unwrap()).collect()),
        ..Serving::default()
    };
    let hindered = Serving {
        obstacle: Some("the dataplane uses no interface".to_owned()),
        ..Serving::default()
    };
    // Without a dataplane, on a standby director, on the active one, with a dataplane that does not
    // forward checks, and on a standby director again.
    for (serving, through) in [
        (None, false),
        (Some(vips(&[])), false),
        (Some(vips(&["192.0.2.1"])), true),
        (Some(Serving::default()), true),
        (Some(hindered), false),
        (Some(vips(&["192.0.2.2"])), false),
    ] {
        if let Some(serving) = serving {
            checks.take_serving(serving);
        }
        tokio::time::sleep(Duration::from_secs(3)).await;
        paths.take();
        tokio::time::sleep(Duration::from_secs(3)).await;
        let asked = paths.take();
        assert!(
            asked.len() >= 2 && asked.iter().all(|via| *via == through),
            "expected through the service: {through}, found: {asked:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn services_with_the_same_check_share_one_probe() {
    let well = Well::default();
    let (mut checks, mut reports) = Checks::new(well.clone(), None);
    let tcp = "type = \"tcp\", interval = \"1s\", jitter = 0";
    let all = config(&[(1, tcp), (2, tcp), (3, tcp)]);
    checks.set(checks_of(&all.services));
    assert_eq!(checks.len(), 1);
    let changes = checks
        .take(reports.recv().await.expect("the check reports a result"))
        .changes;
    let stated: Vec<Key> = changes.iter().map(|change| change.key).collect();
    assert_eq!(stated, keys(&all));
    assert_eq!(health(&checks, &all), [Health::Up; 3]);
    tokio::time::sleep(Duration::from_secs(100)).await;
    let asked = well.asked.lock().unwrap().len();
    assert!((100..=102).contains(&asked), "{asked}");
    // One service is removed, and the others continue.
    checks.set(checks_of(&config(&[(2, tcp)]).services));
    assert_eq!(checks.len(), 1);
    assert_eq!(
        health(&checks, &all),
        [Health::Up; 3],
        "removing a service changed the health of a server"
    );
}

#[tokio::test(start_paused = true)]
async fn contradicting_result_causes_checks_at_fast_interval_until_state_changes() {
    let well = Well::default();
    let (mut checks, mut reports) = Checks::new(well.clone(), None);
    let check = "type = \"tcp\", interval = \"10s\", fast_interval = \"1s\", jitter = 0, fall = 3, rise = 2";
    checks.set(checks_of(&config(&[(1, check)]).services));
    let _ = reports.recv().await.expect("the server is reported up");
    tokio::time::sleep(Duration::from_secs(60)).await;
    *well.down.lock().unwrap() = true;
    well.asked.lock().unwrap().clear();
    let report = reports.recv().await.expect("the server is reported down");
    assert_eq!(report.up, Some(false));
    let asked = well.asked.lock().unwrap().clone();
    let between: Vec<u64> = asked.windows(2).map(|w| (w[1] - w[0]).as_secs()).collect();
    assert_eq!(between, [1, 1]);
    // When nothing changes any more, checks are rare.
    tokio::time::sleep(Duration::from_millis(20_500)).await;
    assert_eq!(well.asked.lock().unwrap().len(), 5);
}

#[tokio::test(start_paused = true)]
async fn check_interval_varies_within_jitter() {
    let well = Well::default();
    let (mut checks, _reports) = Checks::new(well.clone(), None);
    checks.set(checks_of(
        &config(&[(1, "type = \"tcp\", interval = \"10s\", jitter = 20")]).services,
    ));
    tokio::time::sleep(Duration::from_secs(10_000)).await;
    let asked = well.asked.lock().unwrap().clone();
    let between = asked[1..].windows(2).map(|w| (w[1] - w[0]).as_secs_f64());
    let (mut least, mut most) = (f64::MAX, 0.0_f64);
    for seconds in between {
        least = least.min(seconds);
        most = most.max(seconds);
    }
    assert!((7.99..8.5).contains(&least), "{least}");
    assert!((11.5..12.01).contains(&most), "{most}");
}

#[tokio::test(start_paused = true)]
async fn server_failing_first_check_is_down_at_once_or_after_fall_failures_if_serving() {
    let check = "type = \"tcp\", interval = \"5s\", timeout = \"1s\", fall = 3, jitter = 0";
    for (serving, soon) in [(true, false), (false, true)] {
        let well = Well::default();
        *well.down.lock().unwrap() = true;
        let (mut checks, mut reports) = Checks::new(well.clone(), None);
        let config = config(&[(1, check)]);
        checks.set(checks_of(&config.services));
        // The probe of the dataplane runs a little later than the probe of the server.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let server = config.services[0].servers[0].address;
        checks.take_serving(Serving {
            servers: serving.then_some(server).into_iter().collect(),
            ..Serving::default()
        });
        tokio::time::sleep(Duration::from_millis(10)).await;
        let stated = reports.try_recv();
        assert_eq!(stated.is_ok(), soon, "{stated:?}");
        if serving {
            let report = reports.recv().await.expect("the server is down at the end");
            assert_eq!(report.up, Some(false));
            assert_eq!(well.asked.lock().unwrap().len(), 3);
        }
    }
}

/// Unanswered clients alone do not set a server down: any client can cause unanswered attempts.
#[tokio::test(start_paused = true)]
async fn unanswered_clients_trigger_a_check_whose_single_failure_sets_server_down() {
    let well = Well::default();
    let (mut checks, mut reports) = Checks::new(well.clone(), None);
    let config = config(&[(
        1,
        "type = \"tcp\", passive = 3, rise = 2, fall = 3, interval = \"100s\", fast_interval = \"1s\", jitter = 0",
    )]);
    checks.set(checks_of(&config.services));
    let key = keys(&config)[0];
    let up = reports.recv().await.expect("the server is reported up");
    assert_eq!(checks.take(up).changes.len(), 1);
    let take = |checks: &mut Checks<Well>, count| {
        checks.take_unanswered([(key, count)].into_iter());
    };
    let asked = |well: &Well| well.asked.lock().unwrap().len();
    // The second check, at a random time.
    tokio::time::sleep(Duration::from_secs(101)).await;
    let before = asked(&well);
    for count in [1, 2, 0, 2] {
        take(&mut checks, count);
    }
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!(
        asked(&well),
        before,
        "a check was made although clients got answers in between"
    );
    // A flood from another host: the server is checked at most once in `fast_interval`, and is up.
    let begun = Instant::now();
    for count in 1..=100 {
        take(&mut checks, 3 * count);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let more = asked(&well) - before;
    let seconds = usize::try_from(begun.elapsed().as_secs()).unwrap();
    assert!(
        (1..=seconds + 1).contains(&more),
        "{more} checks were made in {seconds} s: none, or more than one a second"
    );
    assert!(reports.try_recv().is_err(), "a server was marked as down");
    assert!(checks.timing.counters.get().prompted > 0);

    // If the check fails as well, one failure is sufficient.
    tokio::time::sleep(Duration::from_secs(5)).await;
    *well.down.lock().unwrap() = true;
    take(&mut checks, 303);
    let since = Instant::now();
    let down = reports.recv().await.expect("the server is reported down");
    assert!(since.elapsed() <= Duration::from_secs(1));
    let change = checks
        .take(down)
        .changes
        .pop()
        .expect("the server changes its state");
    assert!(
        !change.up
            && change.reason.text.contains("refused")
            && change.reason.text.contains("3 connection attempts"),
        "{change:?}"
    );
    // Repeated attempts of waiting clients do not keep a server down.
    *well.down.lock().unwrap() = false;
    take(&mut checks, 330);
    let good = reports.recv().await.expect("the check reports a result");
    assert!(checks.take(good).changes.is_empty());
    let known = checks.known(&key).expect("the server is checked");
    assert!(known.reason.text.contains("succeeded"), "{known:?}");
    let up = reports.recv().await.expect("the check reports a result");
    assert!(
        checks
            .take(up)
            .changes
            .pop()
            .expect("the server changes its state")
            .up
    );
    let before = asked(&well);
    take(&mut checks, 332);
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!(
        asked(&well),
        before,
        "a check was made after two attempts, although `passive` is 3"
    );
}

#[tokio::test(start_paused = true)]
async fn check_reason_is_truncated_to_256_bytes() {
    struct Wordy;
    impl Prober for Wordy {
        async fn probe(&self, _: &Check) -> Result<Advice, ProbeError> {
            Err(ProbeError::server("ä".repeat(1 << 20)))
        }
    }
    let (mut checks, mut reports) = Checks::new(Wordy, None);
    let config = config(&[(1, "type = \"tcp\"")]);
    checks.set(checks_of(&config.services));
    let report = reports.recv().await.expect("the server is reported down");
    let change = checks
        .take(report)
        .changes
        .pop()
        .expect("the server changes its state");
    assert!(
        (250..=256).contains(&change.reason.text.len()),
        "{}",
        change.reason
    );
    assert!(change.reason.text.ends_with("ä..."));
    let known = checks
        .known(&keys(&config)[0])
        .expect("the server is checked");
    assert!(known.reason.text.capacity() <= 256);
}

#[tokio::test(start_paused = true)]
async fn descriptors_of_identical_checks_are_counted_once() {
    let (mut checks, _reports) = Checks::new(Well::default(), None);
    let exec = "type = \"exec\", command = \"/bin/true\"";
    checks.set(checks_of(
        &config(&[(1, "type = \"tcp\""), (2, "type = \"tcp\""), (3, exec)]).services,
    ));
    assert_eq!(checks.descriptors(), 1 + 4);
}

/// A prober whose answer the test sets.
#[derive(Clone)]
struct Told(Arc<Mutex<Result<Advice, ProbeError>>>);

impl Told {
    fn new(reason: &str) -> Self {
        Self(Arc::new(Mutex::new(Err(ProbeError::server(reason)))))
    }

    fn set(&self, result: Result<Advice, ProbeError>) {
        *self.0.lock().unwrap() = result;
    }
}

impl Prober for Told {
    async fn probe(&self, _: &Check) -> Result<Advice, ProbeError> {
        self.0.lock().unwrap().clone()
    }
}

#[tokio::test(start_paused = true)]
async fn down_server_shows_reason_of_last_check_and_logs_limited_number_of_reasons() {
    let stated = Told::new("refused");
    let (mut checks, mut reports) = Checks::new(stated.clone(), None);
    let config = config(&[(1, "type = \"tcp\", interval = \"1s\", rise = 3")]);
    checks.set(checks_of(&config.services));
    let key = keys(&config)[0];
    let down = checks.take(reports.recv().await.expect("the server is reported down"));
    assert_eq!(down.changes.len(), 1);
    let mut logged = Vec::new();
    for reason in ["status 503", "refused", "status 503", "status 500"] {
        stated.set(Err(ProbeError::server(reason)));
        let news = checks.take(reports.recv().await.expect("the check reports a result"));
        assert!(
            news.changes.is_empty() && !news.advice,
            "an event was reported"
        );
        assert_eq!(
            checks
                .known(&key)
                .expect("the server is checked")
                .reason
                .text,
            reason
        );
        logged.extend(news.reasons.into_iter().map(|(_, reason)| reason.text));
    }
    assert_eq!(
        logged,
        ["status 503", "status 500"],
        "a reason was not logged exactly once"
    );
    // A repeated reason is not reported.
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(reports.try_recv().is_err());
    // A program that returns another reason each time does not fill the log.
    for n in 0..100 {
        stated.set(Err(ProbeError::server(format!("at {n}"))));
        let news = checks.take(reports.recv().await.expect("the check reports a result"));
        logged.extend(news.reasons.into_iter().map(|(_, reason)| reason.text));
    }
    assert_eq!(
        checks
            .known(&key)
            .expect("the server is checked")
            .reason
            .text,
        "at 99"
    );
    assert_eq!(
        logged.len(),
        REASONS_MAX - 1,
        "the limit of logged reasons, with the reason of the change, was not kept"
    );
    // While the server returns, the old reason is not shown.
    stated.set(Ok(Advice::NONE));
    let news = checks.take(reports.recv().await.expect("the check reports a result"));
    assert!(news.changes.is_empty() && news.reasons.is_empty());
    let reason = checks
        .known(&key)
        .expect("the server is checked")
        .reason
        .text;
    assert!(
        reason.contains("succeeded") && reason.contains('3'),
        "{reason}"
    );
    let up = checks.take(reports.recv().await.expect("the server is reported up"));
    assert!(up.changes[0].up);
    assert_eq!(
        checks
            .known(&key)
            .expect("the server is checked")
            .reason
            .text,
        ""
    );
}

#[tokio::test(start_paused = true)]
async fn check_is_reported_as_not_made_from_third_failed_attempt_until_one_runs() {
    let stated = Told::new("refused");
    stated.set(Ok(Advice::NONE));
    let (mut checks, mut reports) = Checks::new(stated.clone(), None);
    let config = config(&[(1, "type = \"tcp\", interval = \"1s\", jitter = 0")]);
    checks.set(checks_of(&config.services));
    let key = keys(&config)[0];
    assert!(
        checks
            .take(reports.recv().await.expect("the server is reported up"))
            .changes[0]
            .up
    );
    // The second check comes at a random time.
    tokio::time::sleep(Duration::from_secs(5)).await;
    stated.set(Err(ProbeError::Local("no descriptors".into())));
    tokio::time::sleep(Duration::from_millis(1_900)).await;
    assert!(
        reports.try_recv().is_err(),
        "the check was reported as not made after two attempts"
    );
    let news = checks.take(reports.recv().await.expect("the third report arrives"));
    assert!(news.changes.is_empty() && news.reasons.is_empty() && !news.advice);
    assert_eq!(checks.not_made(), 1);
    tokio::time::sleep(Duration::from_secs(60)).await;
    let known = checks.known(&key).expect("the server is checked");
    assert_eq!(known.up, Some(true), "the state of the server changed");
    let not_made = known.not_made.expect("the check is reported as not made");
    assert_eq!(not_made.reason, "no descriptors");
    assert!((61..64).contains(&not_made.since.elapsed().as_secs()));
    assert!(
        reports.try_recv().is_err(),
        "the same cause was reported twice"
    );
    // Another cause is shown; a check that runs ends the report.
    stated.set(Err(ProbeError::Local("no memory".into())));
    checks.take(reports.recv().await.expect("the check reports a result"));
    let known = checks.known(&key).expect("the server is checked").not_made;
    assert_eq!(
        known.expect("the check is reported as not made").reason,
        "no memory"
    );
    stated.set(Ok(Advice::NONE));
    let news = checks.take(reports.recv().await.expect("the check reports a result"));
    assert!(news.changes.is_empty());
    assert_eq!(
        checks.known(&key).expect("the server is checked").not_made,
        None
    );
    assert_eq!(checks.not_made(), 0);
}

#[tokio::test(start_paused = true)]
async fn check_that_has_never_run_is_reported_as_not_made() {
    let stated = Told::new("");
    stated.set(Err(ProbeError::Local("no descriptors".into())));
    let (mut checks, mut reports) = Checks::new(stated, None);
    let config = config(&[(1, "type = \"tcp\", interval = \"1s\"")]);
    checks.set(checks_of(&config.services));
    checks.take(reports.recv().await.expect("the third report arrives"));
    let known = checks
        .known(&keys(&config)[0])
        .expect("the server is checked");
    assert_eq!(known.up, None);
    assert!(known.not_made.is_some());
}
