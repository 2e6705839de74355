//! Parameters of published measurements of encryption in PostgreSQL, so that results can be
//! compared.

use super::CellPlan;
use super::pgbench::{Pgbench, Script};
use crate::plan::{Length, Plan, Stratum};

/// Scale 10, 4 clients, `-S`, shared_buffers swept over the size of the data.
pub(super) fn buffers(plan: &mut Plan) -> Vec<CellPlan> {
    [16, 32, 64, 128, 256]
        .map(|buffers| {
            let mut bench = Pgbench::new(plan, "preset-buffers", Script::SelectOnly);
            bench.scale = plan.capped_scale(10, Stratum::Cache);
            bench.clients = 4;
            bench.stratum = Stratum::Cache;
            bench.shared_buffers = Some(buffers);
            bench.cell(plan)
        })
        .into()
}

/// Scales 50, 500, 5000 with 12 to 48 clients, read-only and TPC-B, at a quarter of the memory.
pub(super) fn scales(plan: &mut Plan) -> Vec<CellPlan> {
    let mut cells = Vec::new();
    let mut last = 0;
    for wanted in [50, 500, 5000] {
        let scale = plan.capped_scale(wanted, Stratum::Cache);
        if scale == last {
            continue;
        }
        last = scale;
        for script in [Script::SelectOnly, Script::TpcB] {
            for clients in [12, 24, 48] {
                let mut bench = Pgbench::new(plan, "preset-scales", script);
                (bench.scale, bench.clients, bench.stratum) = (scale, clients, Stratum::Cache);
                bench.shared_buffers = Some(plan.machine.available_mb / 4 / plan.sides.max(1));
                cells.push(bench.cell(plan));
            }
        }
    }
    cells
}

/// Scale 100, 100 clients, 10,000 transactions each.
pub(super) fn hundred(plan: &mut Plan) -> Vec<CellPlan> {
    let mut bench = Pgbench::new(plan, "preset-hundred", Script::TpcB);
    bench.scale = plan.capped_scale(100, Stratum::Cache);
    bench.clients = 100;
    bench.stratum = Stratum::Cache;
    let each = match plan.length {
        Length::Transactions(each) => each,
        Length::Seconds(_) => 10_000,
    };
    if each != 10_000 {
        plan.notes
            .push(format!("preset-hundred: {each} transactions per client instead of 10,000"));
    }
    bench.length = Length::Transactions(each);
    let mut cell = bench.cell(plan);
    cell.seconds = f64::from(each) / 10.0;
    vec![cell]
}
