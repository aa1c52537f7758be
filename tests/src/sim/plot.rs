//! Usable over time as an SVG: a panel for each arm, a line for each VM.

use std::path::{Path, PathBuf};

use plotters::prelude::*;

use super::run::{Outcome, VmOutcome};

/// A plot that couldn't be written.
#[derive(Debug, thiserror::Error)]
#[error("{path}: can't write the plot: {problem}")]
pub struct PlotError {
    path: PathBuf,
    problem: String,
}

const WIDTH: u32 = 1000;
const PANEL: u32 = 220;

/// Draws the runs of one scenario, one below the other.
///
/// # Errors
/// When the file can't be written.
pub fn usable_over_time(runs: &[Outcome], path: &Path) -> Result<(), PlotError> {
    draw(runs, path).map_err(|problem| PlotError {
        path: path.to_owned(),
        problem: problem.to_string(),
    })
}

fn draw(runs: &[Outcome], path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let panels = u32::try_from(runs.len())?.max(1);
    let area = SVGBackend::new(path, (WIDTH, PANEL * panels)).into_drawing_area();
    area.fill(&WHITE)?;
    for (panel, run) in area.split_evenly((runs.len().max(1), 1)).iter().zip(runs) {
        let most = run.vms.iter().map(|vm| vm.vcpus).max().unwrap_or(1);
        let title = format!("{}: {}", run.scenario, run.arm);
        let mut chart = ChartBuilder::on(panel)
            .caption(title, ("sans-serif", 16))
            .margin(8)
            .x_label_area_size(28)
            .y_label_area_size(36)
            .build_cartesian_2d(0.0..run.end, 0.0..most as f64 + 0.5)?;
        chart
            .configure_mesh()
            .x_desc("seconds")
            .y_desc("usable")
            .draw()?;
        for (index, vm) in run.vms.iter().enumerate() {
            let color = Palette99::pick(index).to_rgba();
            // A little apart, so that equal lines are all seen.
            let shift = index as f64 * 0.02;
            chart
                .draw_series(LineSeries::new(steps(vm, run.end, shift), &color))?
                .label(&vm.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 12, y)], color));
        }
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.8))
            .draw()?;
    }
    area.present()?;
    Ok(())
}

fn steps(vm: &VmOutcome, end: f64, shift: f64) -> Vec<(f64, f64)> {
    let mut points = Vec::new();
    for (at, usable) in &vm.usable {
        if let Some((_, before)) = points.last().copied() {
            points.push((*at, before));
        }
        points.push((*at, *usable as f64 + shift));
    }
    if let Some((_, last)) = points.last().copied() {
        points.push((end, last));
    }
    points
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usable_is_drawn_in_steps() {
        let vm = VmOutcome {
            name: "vm".to_owned(),
            vcpus: 4,
            weight: 100.0,
            wants: None,
            work: 0.0,
            run: 0.0,
            run_delay: 0.0,
            spun: 0.0,
            overhead: 0.0,
            usable: vec![(0.0, 4), (1.0, 2)],
        };
        assert_eq!(
            steps(&vm, 3.0, 0.0),
            [(0.0, 4.0), (1.0, 4.0), (1.0, 2.0), (3.0, 2.0)]
        );
    }
}
