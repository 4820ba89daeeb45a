//! The list of incidents for people: one row each in aligned columns, followed by the sentence.

use serde_json::Value;
use xpu_timer_analysis::rank_set::RankSet;
use xpu_timer_proto::printable;

const HEADER: [&str; 7] = ["INCIDENT", "OPENED (UTC)", "JOB", "STATUS", "CAUSE", "CONF.", "CULPRITS"];
/// This column is optional: the name of an incident also contains its time.
const OPENED: usize = 1;
/// Index after the column `OPENED` was removed.
const JOB: usize = 1;
/// A job name is never shortened below this.
const SHORTEST_JOB: usize = 8;
const GAP: &str = "  ";

/// The incidents of `/incidents` in lines of at most `width` characters. `None` shortens nothing,
/// so that the output can be searched.
pub fn of(incidents: &[Value], width: Option<usize>) -> String {
    let mut rows: Vec<Vec<String>> = incidents.iter().map(row).collect();
    rows.insert(0, HEADER.map(String::from).to_vec());
    let width = width.unwrap_or(usize::MAX);
    if total(&rows) > width {
        rows.iter_mut().for_each(|row| drop(row.remove(OPENED)));
        let excess = total(&rows).saturating_sub(width);
        let job = widest(&rows, JOB).saturating_sub(excess).max(SHORTEST_JOB);
        rows.iter_mut().for_each(|row| row[JOB] = clipped(&row[JOB], job));
    }
    let widths: Vec<usize> = (0..rows[0].len()).map(|column| widest(&rows, column)).collect();
    let clip = |line: &str| format!("{}\n", clipped(line.trim_end(), width));
    let line = |row: &[String]| {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        clip(&cells.join(GAP))
    };
    let mut text = line(&rows[0]);
    for (row, incident) in rows[1..].iter().zip(incidents) {
        text.push_str(&line(row));
        let sentence = incident["sentence"].as_str().unwrap_or("no verdict yet");
        text.push_str(&clip(&format!("  {}", printable::line(sentence))));
    }
    text
}

fn widest(rows: &[Vec<String>], column: usize) -> usize {
    rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0)
}

fn total(rows: &[Vec<String>]) -> usize {
    let columns = rows[0].len();
    (0..columns).map(|column| widest(rows, column)).sum::<usize>() + (columns - 1) * GAP.len()
}

fn row(incident: &Value) -> Vec<String> {
    let text = |name: &str| match incident[name].as_str() {
        Some(text) if !text.is_empty() => printable::line(text).into_owned(),
        _ => "-".into(),
    };
    let opened = text("opened_at");
    // 2026-11-21T13:20:19.123Z
    let opened = opened.get(..16).map_or(opened.clone(), |minute| minute.replace('T', " "));
    vec![text("incident"), opened, text("job"), text("status"), text("cause"), text("confidence"), culprits(incident)]
}

fn culprits(incident: &Value) -> String {
    let ranks = incident["culprits"].as_array().into_iter().flatten();
    let ranks: RankSet = ranks.filter_map(|rank| rank.as_u64()?.try_into().ok()).collect();
    if ranks.is_empty() { "-".into() } else { ranks.to_string().replace('/', ",") }
}

/// The beginning of a text, with an ellipsis if it was cut.
fn clipped(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_string();
    }
    let kept: String = text.chars().take(width.saturating_sub(1)).collect();
    format!("{kept}…")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn incidents() -> Vec<Value> {
        vec![
            json!({
                "incident": "20261121T132019Z-0e0c1f66", "opened_at": "2026-11-21T13:20:19.5Z", "job": "llama-70b-pretrain-run-17",
                "status": "open", "cause": "data_loader", "confidence": "high", "culprits": [2, 3, 4, 9],
                "sentence": format!("Rank 2 waits for its data loader{}", " and so on".repeat(20)),
            }),
            json!({ "incident": "20261121T140000Z-00000001", "job": "", "status": "resolved", "cause": "unknown", "culprits": [] }),
        ]
    }

    #[test]
    fn columns_stand_below_their_names() {
        let text = of(&incidents(), None);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[..2],
            [
                "INCIDENT                   OPENED (UTC)      JOB                        STATUS    CAUSE        CONF.  CULPRITS",
                "20261121T132019Z-0e0c1f66  2026-11-21 13:20  llama-70b-pretrain-run-17  open      data_loader  high   2-4,9",
            ]
        );
        assert!(lines[2].starts_with("  Rank 2 waits for its data loader and") && lines[2].ends_with("so on"));
        assert_eq!(lines[3].split_whitespace().last(), Some("-"));
        assert_eq!(lines[4], "  no verdict yet");
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        for width in [40, 80, 100, 200] {
            let text = of(&incidents(), Some(width));
            assert!(text.lines().all(|line| line.chars().count() <= width), "{width}: {text}");
            assert_eq!(text.lines().count(), 5);
        }
        let of_a_plain_terminal = of(&incidents(), Some(80));
        let row = of_a_plain_terminal.lines().nth(1).unwrap();
        assert_eq!(row, "20261121T132019Z-0e0c1f66  llama-70b-pr…  open      data_loader  high   2-4,9");
    }
}
