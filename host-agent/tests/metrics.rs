//! Metrics and health over real TCP, read by a strict parser of the text format.
#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use common::{PATIENCE, agent, host_view, vm, vm_view};
use hint_broker::metrics::MetricsServer;
use hint_broker::model::{Contention, HostView, Outcome, RecordState, Vcpus};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;

type Labels = BTreeMap<String, String>;

/// A page that follows every rule of the format.
#[derive(Debug, Default)]
struct Page {
    kinds: BTreeMap<String, String>,
    series: BTreeMap<(String, Labels), f64>,
}

impl Page {
    /// Panics where the text breaks a rule.
    fn parse(text: &str) -> Self {
        let mut page = Self::default();
        let mut helped = BTreeSet::new();
        let mut done = BTreeSet::new();
        let mut current = String::new();
        assert!(text.ends_with('\n'));
        for line in text.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                let (name, help) = help.split_once(' ').expect("a help text");
                assert!(!help.is_empty() && helped.insert(name.to_owned()), "{line}");
            } else if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').unwrap();
                assert!(matches!(kind, "gauge" | "counter"), "{line}");
                assert!(helped.contains(name), "no HELP before: {line}");
                assert!(done.insert(name.to_owned()), "a second TYPE: {line}");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
                assert!(
                    page.kinds
                        .insert(name.to_owned(), kind.to_owned())
                        .is_none()
                );
                current = name.to_owned();
            } else {
                let (name, labels, value) = series(line);
                assert_eq!(name, current, "outside its family: {line}");
                assert!(name.starts_with("hint_broker_"), "{line}");
                assert!(
                    page.series.insert((name, labels), value).is_none(),
                    "twice: {line}"
                );
            }
        }
        page
    }

    fn get(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let labels = labels
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        self.series.get(&(name.to_owned(), labels)).copied()
    }

    fn of(&self, name: &str, vm: &str) -> Option<f64> {
        self.get(name, &[("vm", vm)])
    }

    fn labels(&self, name: &str) -> Vec<&Labels> {
        self.series
            .keys()
            .filter(|(series, _)| series == name)
            .map(|(_, labels)| labels)
            .collect()
    }
}

fn series(line: &str) -> (String, Labels, f64) {
    let name: String = line
        .chars()
        .take_while(|c| c.is_ascii_alphanumeric() || *c == '_')
        .collect();
    let mut rest = &line[name.len()..];
    let mut labels = Labels::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            let (label, value) = rest.split_once("=\"").expect("a label");
            let mut text = String::new();
            let mut chars = value.char_indices();
            let end = loop {
                match chars.next().expect("a closing quote") {
                    (at, '"') => break at,
                    (_, '\\') => text.push(match chars.next().unwrap().1 {
                        'n' => '\n',
                        c @ ('\\' | '"') => c,
                        c => panic!("escape {c:?} in {line}"),
                    }),
                    (_, c) => text.push(c),
                }
            };
            assert!(labels.insert(label.to_owned(), text).is_none(), "{line}");
            rest = &value[end + 1..];
            match rest.chars().next() {
                Some(',') => rest = &rest[1..],
                Some('}') => break,
                other => panic!("{other:?} after a label in {line}"),
            }
        }
        rest = &rest[1..];
    }
    let value = rest.strip_prefix(' ').expect("a blank before the value");
    (name, labels, value.parse().expect("a number"))
}

async fn serve(view: HostView) -> (SocketAddr, watch::Sender<Arc<HostView>>) {
    let server = MetricsServer::bind("127.0.0.1:0".parse().unwrap())
        .await
        .unwrap();
    let address = server.address();
    let (sender, view) = watch::channel(Arc::new(view));
    tokio::spawn(server.serve(view, std::future::pending()));
    (address, sender)
}

/// Status, head and body of the answer to a request.
async fn ask(address: SocketAddr, request: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    timeout(PATIENCE, stream.read_to_string(&mut answer))
        .await
        .unwrap()
        .unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head.to_ascii_lowercase(), body.to_owned())
}

async fn get(address: SocketAddr, path: &str) -> (u16, String, String) {
    ask(address, &format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n")).await
}

async fn scrape(address: SocketAddr) -> Page {
    let (status, head, body) = get(address, "/metrics").await;
    assert_eq!(status, 200);
    assert!(
        head.contains("content-type: text/plain; version=0.0.4"),
        "{head}"
    );
    Page::parse(&body)
}

#[tokio::test]
async fn every_figure_is_on_the_page() {
    let mut failing = agent("0");
    failing.outcome = Some(Outcome::Failed("EINVAL".to_owned()));
    failing.runnable_tasks = Some(9);
    let mut view = host_view(vec![
        vm_view(vm(10, "db"), Some(failing)),
        vm_view(vm(20, "web"), None),
    ]);
    view.record = Some(RecordState {
        bytes: 4096,
        lost_ticks: 3,
        failing: true,
    });
    let (address, _view) = serve(view).await;
    let page = scrape(address).await;
    for (name, value) in [
        ("hint_broker_ticks_total", 10.0),
        ("hint_broker_rejected_samples_total", 1.0),
        ("hint_broker_degraded_sources", 0.0),
        ("hint_broker_record_bytes", 4096.0),
        ("hint_broker_record_failing", 1.0),
        ("hint_broker_record_lost_ticks_total", 3.0),
        ("hint_broker_pool_pcpus", 2.0),
        ("hint_broker_pool_supply_cpus", 2.0),
        ("hint_broker_pool_used_cpus", 1.98),
        ("hint_broker_pool_contended", 1.0),
        ("hint_broker_mode", 2.0),
        ("hint_broker_vms", 2.0),
    ] {
        assert_eq!(page.get(name, &[]), Some(value), "{name}");
    }
    for (name, value) in [
        ("hint_broker_vm_vcpus", 4.0),
        ("hint_broker_vm_usable_vcpus", 1.0),
        ("hint_broker_vm_applied_cpus", 1.0),
        ("hint_broker_vm_demand_cpus", 4.0),
        ("hint_broker_vm_target_cpus", 1.0),
        ("hint_broker_vm_run_seconds_total", 2.5),
        ("hint_broker_vm_run_delay_seconds_total", 0.75),
        ("hint_broker_vm_folds_total", 3.0),
        ("hint_broker_vm_unfolds_total", 2.0),
        ("hint_broker_vm_agent_connected", 1.0),
        ("hint_broker_vm_agent_failing", 1.0),
        ("hint_broker_vm_runnable_tasks", 9.0),
        ("hint_broker_vm_mode", 2.0),
        ("hint_broker_vm_weight", 100.0),
    ] {
        assert_eq!(page.of(name, "10-7"), Some(value), "{name}");
    }
    let reason = [("reason", "contention"), ("vm", "10-7")];
    assert_eq!(page.get("hint_broker_vm_reason_info", &reason), Some(1.0));
    assert_eq!(page.of("hint_broker_vm_agent_connected", "20-7"), Some(0.0));
    assert_eq!(page.of("hint_broker_vm_applied_cpus", "20-7"), None);
    assert_eq!(page.labels("hint_broker_vm_agent_info").len(), 1);
}

#[tokio::test]
async fn twins_and_odd_names_do_not_break_the_scrape() {
    let odd = "a\"b\\c\nd{}=,\u{1b}[0m ü";
    let view = host_view(vec![
        vm_view(vm(116, "app"), None),
        vm_view(vm(119, "app"), None),
        vm_view(vm(120, odd), None),
    ]);
    let (address, _view) = serve(view).await;
    let page = scrape(address).await;
    let names: Vec<(&str, &str)> = page
        .labels("hint_broker_vm_info")
        .iter()
        .map(|labels| (labels["vm"].as_str(), labels["name"].as_str()))
        .collect();
    assert!(names.contains(&("116-7", "app")) && names.contains(&("119-7", "app")));
    assert!(
        names.contains(&("120-7", "a\"b\\c?d{}=,?[0m ü")),
        "{names:?}"
    );
}

#[tokio::test]
async fn what_is_not_known_has_no_series() {
    let mut unknown = vm_view(vm(10, "v"), None);
    unknown.vm.vcpus = Vcpus::Unclassified("no names".to_owned());
    unknown.usable = None;
    unknown.demand = None;
    unknown.target = None;
    let view = HostView {
        supply: None,
        used: None,
        contention: Contention::Unknown,
        ..host_view(vec![unknown])
    };
    let (address, _view) = serve(view).await;
    let page = scrape(address).await;
    for name in [
        "hint_broker_record_bytes",
        "hint_broker_record_failing",
        "hint_broker_record_lost_ticks_total",
        "hint_broker_pool_supply_cpus",
        "hint_broker_pool_used_cpus",
        "hint_broker_pool_contended",
        "hint_broker_vm_vcpus",
        "hint_broker_vm_usable_vcpus",
        "hint_broker_vm_applied_cpus",
        "hint_broker_vm_demand_cpus",
        "hint_broker_vm_target_cpus",
        "hint_broker_vm_run_seconds_total",
        "hint_broker_vm_run_delay_seconds_total",
        "hint_broker_vm_agent_failing",
        "hint_broker_vm_runnable_tasks",
    ] {
        assert!(page.labels(name).is_empty(), "{name}");
        assert!(!page.kinds.contains_key(name), "{name}");
    }
    Page::parse(&get(serve(HostView::default()).await.0, "/metrics").await.2);
}

#[tokio::test]
async fn a_departed_vm_leaves_the_page_and_totals_grow() {
    let (address, sender) = serve(host_view(vec![vm_view(vm(10, "v"), None)])).await;
    assert_eq!(
        scrape(address)
            .await
            .of("hint_broker_vm_folds_total", "10-7"),
        Some(3.0)
    );
    let mut next = vm_view(vm(11, "v"), None);
    next.folds = 4;
    sender.send_replace(Arc::new(host_view(vec![next])));
    let page = scrape(address).await;
    assert_eq!(page.of("hint_broker_vm_folds_total", "10-7"), None);
    assert_eq!(page.of("hint_broker_vm_folds_total", "11-7"), Some(4.0));
}

#[tokio::test]
async fn other_paths_and_methods_are_refused_by_their_codes() {
    let (address, _view) = serve(host_view(vec![])).await;
    let (status, _, body) = get(address, "/healthz").await;
    assert_eq!((status, body.as_str()), (200, "ok\n"));
    assert_eq!(get(address, "/").await.0, 404);
    assert_eq!(get(address, "/metrics/").await.0, 404);
    assert_eq!(get(address, "/metrics?x=1").await.0, 200);
    let (status, head, body) = ask(address, "HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert_eq!((status, body.as_str()), (200, ""));
    assert!(head.contains("content-length: ") && !head.contains("content-length: 0"));
    let post = "POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n";
    let (status, head, _) = ask(address, post).await;
    assert_eq!(status, 405);
    assert!(head.contains("allow: get, head"), "{head}");
    let huge = format!("GET /metrics HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(20_000));
    assert_eq!(ask(address, &huge).await.0, 431);
}

#[tokio::test]
async fn scrapers_that_say_nothing_do_not_block_the_next_for_good() {
    let (address, _view) = serve(host_view(vec![])).await;
    let mut silent = Vec::new();
    for _ in 0..40 {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    // Those let in are closed when their head takes too long.
    let start = tokio::time::Instant::now();
    loop {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let _ = stream
            .write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            .await;
        let mut answer = Vec::new();
        let _ = timeout(PATIENCE, stream.read_to_end(&mut answer))
            .await
            .unwrap();
        if answer.starts_with(b"HTTP/1.1 200") {
            break;
        }
        assert!(start.elapsed() < PATIENCE);
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
}
