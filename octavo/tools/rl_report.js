// Draws the charts of a GRPO run's page from the numbers in #data; charts.js has the drawing.
const data = JSON.parse(byId("data").textContent);
const series = (...names) => names.map(([key, name, weight], i) => ({ ...data[key], name, series: i, weight }));

lineChart(byId("reward"), {
  lines: [
    { ...data.reward, name: "step", series: 0, weight: "faint" },
    { ...data.smooth, name: "average", series: 0 },
  ],
  format: number,
  label: "reward by step",
  height: 260,
});

const charts = {
  gap: [series(["gap_mean", "mean"], ["gap_p99", "99th percentile"]), { log: true }],
  kl: [series(["kl", "KL"]), { zero: true }],
  length: [series(["length", "mean"], ["longest", "longest"]), { zero: true }],
  equal: [series(["equal", "equal groups"]), { zero: true, format: percent }],
  grad_norm: [series(["grad_norm", "gradient norm"]), { log: true }],
  speed: [series(["rollout_tokens_per_s", "rollout"], ["train_tokens_per_s", "training"]), { zero: true }],
};
for (const [id, [lines, how]] of Object.entries(charts)) {
  lineChart(byId(id), { lines, format: number, label: `${id} by step`, ...how });
  const host = byId(`${id}-legend`);
  if (host) legend(host, lines);
}
addEventListener("resize", () => redraw.forEach((draw) => draw()));
