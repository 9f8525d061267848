//! Reads a server's `/metrics` and `/proc` entries: the live baseline that every gate compares with.

use crate::client::{ClientError, Server};
use crate::machine::{field, kib};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Samples of one scrape, by series as it is written: `name{label="value"}`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scrape(BTreeMap<String, f64>);

impl Scrape {
    pub fn parse(text: &str) -> Scrape {
        let sample = |line: &str| {
            let (series, value) = line.rsplit_once(' ')?;
            Some((series.to_string(), value.parse().ok()?))
        };
        Scrape(text.lines().filter(|line| !line.starts_with('#')).filter_map(sample).collect())
    }

    pub async fn of(server: &Server, deadline: Instant) -> Result<Scrape, ClientError> {
        Ok(Scrape::parse(&server.get("/metrics", deadline).await?.text()))
    }

    /// Sum over the series of this name whose labels contain all of `labels` (written `key="value"`).
    pub fn sum(&self, name: &str, labels: &[&str]) -> f64 {
        let of_name =
            |series: &str| series.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('{'));
        self.0
            .iter()
            .filter(|(series, _)| of_name(series) && labels.iter().all(|label| series.contains(label)))
            .map(|(_, value)| value)
            .sum()
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.keys().any(|series| series.split('{').next() == Some(name))
    }
}

/// What a quiet server holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Baseline {
    pub running: f64,
    pub waiting: f64,
    pub pages_used: f64,
    pub rss_bytes: u64,
    pub fds: u64,
}

impl Baseline {
    /// Reads it now; `pid` is None for a server that was given by its address alone.
    pub async fn read(server: &Server, pid: Option<u32>, deadline: Instant) -> Result<Baseline, ClientError> {
        let scrape = Scrape::of(server, deadline).await?;
        Ok(Baseline {
            running: scrape.sum("vllm:num_requests_running", &[]),
            waiting: scrape.sum("vllm:num_requests_waiting", &[]),
            pages_used: scrape.sum("slotgraph_kv_pages_used", &[]),
            rss_bytes: pid.and_then(rss_bytes).unwrap_or_default(),
            fds: pid.and_then(fds).unwrap_or_default(),
        })
    }

    /// Nothing runs, nothing waits, and no page is held beyond what `quiet` held.
    pub fn is_quiet(&self, quiet: &Baseline) -> bool {
        self.running == 0.0 && self.waiting == 0.0 && self.pages_used == quiet.pages_used
    }

    /// Waits until the server is as quiet as `quiet`; how long that took, or the last reading.
    pub async fn wait_quiet(
        server: &Server,
        pid: Option<u32>,
        quiet: &Baseline,
        limit: Duration,
    ) -> Result<Duration, Baseline> {
        let started = Instant::now();
        let mut last = Baseline::default();
        while started.elapsed() < limit {
            if let Ok(now) = Baseline::read(server, pid, started + limit).await {
                if now.is_quiet(quiet) {
                    return Ok(started.elapsed());
                }
                last = now;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Err(last)
    }
}

/// Resident bytes of a process.
pub fn rss_bytes(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    kib(&field(&status, "VmRSS")?)
}

/// Open file descriptors of a process.
pub fn fds(pid: u32) -> Option<u64> {
    Some(std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count() as u64)
}

/// MiB of GPU memory that a process holds, where the driver's tool is there and sees it. Takes a tenth of a second: not for polling.
pub fn device_mib(pid: u32) -> Option<u64> {
    let arguments = ["--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"];
    let output = std::process::Command::new("nvidia-smi").args(arguments).output().ok()?;
    device_mib_of(pid, &String::from_utf8_lossy(&output.stdout))
}

/// Sum over the lines `pid, MiB` of this process; None without one.
fn device_mib_of(pid: u32, text: &str) -> Option<u64> {
    let own = |line: &str| {
        let (named, mib) = line.split_once(',')?;
        (named.trim().parse() == Ok(pid)).then(|| mib.trim().parse::<u64>().ok())?
    };
    text.lines().filter_map(own).reduce(|sum, mib| sum + mib)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_summed_by_name_and_labels() {
        let scrape = Scrape::parse(
            "# HELP a b\n# TYPE a counter\na_total{outcome=\"stop\",code=\"200\"} 3\na_total{outcome=\"error\",code=\"500\"} 2\nb 7.5\n",
        );
        assert_eq!(scrape.sum("a_total", &[]), 5.0);
        assert_eq!(scrape.sum("a_total", &["outcome=\"stop\""]), 3.0);
        assert_eq!(scrape.sum("b", &[]), 7.5);
        assert_eq!(scrape.sum("a", &[]), 0.0);
        assert!(scrape.has("a_total") && !scrape.has("a"));
    }

    #[test]
    fn device_memory_is_summed_over_a_process_s_gpus() {
        let text = "812, 31420\n97, 4\n812, 10\n4100, [N/A]\n";
        assert_eq!(device_mib_of(812, text), Some(31430));
        assert_eq!((device_mib_of(4100, text), device_mib_of(7, text)), (None, None));
    }

    #[test]
    fn this_process_has_memory_and_descriptors() {
        let pid = std::process::id();
        assert!(rss_bytes(pid).unwrap() > 0 && fds(pid).unwrap() > 0);
    }
}
