//! One row of the report: what it cost us and the others, and whether what must hold holds.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::measure::Cost;

/// One work and everything that was measured of it.
#[derive(Debug, Default)]
pub(super) struct Row {
    work: String,
    us: Option<Cost>,
    peers: BTreeMap<String, Cost>,
    /// Why there is no figure of a tool.
    left_out: BTreeMap<String, String>,
    floors: Map<String, Value>,
    figures: Map<String, Value>,
    must: Vec<Claim>,
    /// Claims about tools that are not installed; nothing is said about them.
    not_compared: Vec<String>,
}

/// Something that must hold; `None`: it could not be shown here.
#[derive(Debug)]
struct Claim {
    text: String,
    holds: Option<bool>,
}

impl Row {
    pub(super) fn new(work: impl Into<String>, us: &[Cost]) -> Self {
        Self { work: work.into(), us: Cost::median(us), ..Self::default() }
    }

    pub(super) const fn us(&self) -> Option<Cost> {
        self.us
    }

    pub(super) fn peer(&mut self, name: &str, costs: &[Cost]) {
        if let Some(cost) = Cost::median(costs) {
            self.peers.insert(name.to_owned(), cost);
        }
    }

    pub(super) fn left_out(&mut self, name: &str, why: &str) {
        self.left_out.insert(name.to_owned(), why.to_owned());
    }

    pub(super) fn floor(&mut self, name: &str, costs: &[Cost]) -> Option<Cost> {
        let cost = Cost::median(costs)?;
        self.floors.insert(name.to_owned(), cost.json());
        Some(cost)
    }

    pub(super) fn figure(&mut self, name: &str, value: impl Into<Value>) {
        self.figures.insert(name.to_owned(), value.into());
    }

    /// Claims something; `None`: it cannot be shown in this run.
    pub(super) fn claim(&mut self, text: impl Into<String>, holds: Option<bool>) {
        self.must.push(Claim { text: text.into(), holds });
    }

    /// Our figure is at most `factor` times that of a tool, if it is installed.
    pub(super) fn at_most(&mut self, what: &str, figure: fn(&Cost) -> f64, factor: f64, peer: &str) {
        if self.left_out.contains_key(peer) {
            self.not_compared.push(format!("{what} at most {factor:.3} x {peer}"));
            return;
        }
        let holds = self.us.zip(self.peers.get(peer).copied());
        let holds = holds.map(|(us, peer)| figure(&us) <= factor * figure(&peer));
        self.claim(format!("{what} at most {factor:.3} x {peer}"), holds);
    }

    /// We are `times` faster than every tool that was measured; of none it cannot be shown.
    pub(super) fn faster_than_all(&mut self, times: f64, but: &[&str]) {
        let us = self.us;
        let peers: Vec<f64> = self
            .peers
            .iter()
            .filter(|(name, _)| !but.contains(&name.as_str()))
            .map(|(_, cost)| cost.wall_s)
            .collect();
        let holds = us.filter(|_| !peers.is_empty());
        let holds = holds.map(|us| peers.iter().all(|peer| us.wall_s * times <= *peer));
        self.claim(format!("at least {times} x faster than every tool measured here"), holds);
    }

    pub(super) fn must(&self) -> Option<String> {
        (!self.must.is_empty())
            .then(|| self.must.iter().map(|claim| claim.text.as_str()).collect::<Vec<_>>().join("; "))
    }

    /// False if anything is shown not to hold, none if anything is not shown.
    pub(super) fn holds(&self) -> Option<bool> {
        if self.must.iter().any(|claim| claim.holds == Some(false)) {
            return Some(false);
        }
        self.must
            .iter()
            .all(|claim| claim.holds == Some(true))
            .then_some(true)
            .filter(|_| !self.must.is_empty())
    }

    pub(super) fn json(&self) -> Value {
        let mut peers: Map<String, Value> =
            self.peers.iter().map(|(name, cost)| (name.clone(), cost.json())).collect();
        for (name, why) in &self.left_out {
            peers.insert(name.clone(), Value::from(why.as_str()));
        }
        let texts = |wanted: Option<bool>| -> Vec<&str> {
            self.must.iter().filter(|claim| claim.holds == wanted).map(|claim| claim.text.as_str()).collect()
        };
        json!({
            "work": self.work,
            "us": self.us.map(|us| us.json()),
            "peers": peers,
            "floor": self.floors,
            "figures": self.figures,
            "must": self.must(),
            "holds": self.holds(),
            "broken": texts(Some(false)),
            "not_shown": texts(None),
            "not_compared": self.not_compared,
        })
    }

    /// For people.
    pub(super) fn line(&self) -> String {
        let of =
            |cost: &Cost| format!("{:.3} s, cpu {:.3}, {:.0} MiB", cost.wall_s, cost.cpu_s, cost.peak_mib);
        let verdict = match (self.must().is_some(), self.holds()) {
            (false, _) => "",
            (_, Some(true)) => "holds: ",
            (_, Some(false)) => "BROKEN: ",
            (_, None) => "not shown: ",
        };
        let mut line = format!("{verdict}{}", self.work);
        if let Some(us) = &self.us {
            line.push_str(&format!("\n    us: {}", of(us)));
        }
        for (name, cost) in &self.peers {
            line.push_str(&format!("\n    {name}: {}", of(cost)));
        }
        for (name, floor) in &self.floors {
            line.push_str(&format!("\n    floor {name}: {floor}"));
        }
        for (name, figure) in &self.figures {
            line.push_str(&format!("\n    {name}: {figure}"));
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(wall_s: f64) -> Cost {
        Cost { wall_s, cpu_s: wall_s, peak_mib: 1.0 }
    }

    #[test]
    fn an_absent_tool_is_never_beaten() {
        let mut row = Row::new("work", &[cost(1.0)]);
        row.left_out("restic", "absent");
        row.at_most("wall", |cost| cost.wall_s, 1.0, "restic");
        assert_eq!(row.holds(), None);
        assert_eq!(row.json()["not_compared"], json!(["wall at most 1.000 x restic"]));
        row.at_most("wall", |cost| cost.wall_s, 1.0, "tar");
        assert_eq!(row.holds(), None, "installed and not measured");
        row.faster_than_all(2.0, &[]);
        assert_eq!(row.holds(), None);
        row.peer("restic", &[cost(1.5)]);
        row.faster_than_all(2.0, &[]);
        assert_eq!(row.holds(), Some(false));
    }

    #[test]
    fn a_row_holds_when_all_its_claims_do() {
        let mut row = Row::new("work", &[cost(1.0)]);
        assert_eq!(row.holds(), None, "nothing was claimed");
        row.peer("tar", &[cost(2.5)]);
        row.at_most("wall", |cost| cost.wall_s, 0.5, "tar");
        row.faster_than_all(2.0, &[]);
        assert_eq!(row.holds(), Some(true));
    }
}
