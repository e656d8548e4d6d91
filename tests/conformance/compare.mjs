// Compares the results of `run` in the given folder. Prints the table, then every difference. Exits with 1 if a
// difference is not allowed, if the required one is missing, or if the layer reports calls that did not complete.

import { spawnSync } from "node:child_process";
import { existsSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const work = process.argv[2];
const REFERENCE = "bare";
const TIERS = ["layer", "wrapped"];
/** Bare rmcp behind the program. */
const PROXY = "proxy";
/** Where the server ends a stream before the answer, the program resumes in place of the client, whose stream
 *  continues. The stream must contain the answer, and the suite must not find fault with it. */
const READ_ON = "server-sse-polling";
const COMPARED = [...TIERS, PROXY];
const CONTROL = { server: "control", scenario: "server-sse-polling" };
/** How many requests the scenarios make, not counting `initialize`. */
const CALLS = 34;
/** server-sse-multiple-streams disconnects after each stream's first event. The layer alone cannot know whether the
 *  answer had already been sent, so it may wait for that client, whereas the wrapper knows. */
const UNSURE = { server: "layer", calls: ["tools/list 1000", "tools/list 1001", "tools/list 1002"] };

const problems = [];
const scenarios = readFileSync(join(work, "scenarios"), "utf8").match(/(?<=^ +- )\S+/gm) ?? [];
const results = Object.fromEntries(
  [REFERENCE, ...COMPARED, CONTROL.server].map((server) => [server, resultsOf(server)]),
);

table();
for (const tier of COMPARED) {
  scenarios.filter((scenario) => differs(scenario, tier)).forEach((scenario) => explain(scenario, tier));
}
calls();
control();
if (scenarios.length === 0) problems.push("the suite lists no scenarios");
console.log(problems.map((problem) => `\nFAILED: ${problem}`).join("") || "\nNo difference.");
process.exit(problems.length === 0 ? 0 : 1);

// --- what the suite found

/** Maps each scenario to its checks. The suite names each folder server-<scenario>-<time>. */
function resultsOf(server) {
  const folder = join(work, server, "results");
  const names = existsSync(folder) ? readdirSync(folder) : [];
  return new Map(
    names.map((name) => {
      const scenario = name.replace(/^server-(.+)-\d{4}-\d\d-\d\dT.*$/, "$1");
      return [scenario, JSON.parse(readFileSync(join(folder, name, "checks.json"), "utf8"))];
    }),
  );
}

/** Describes the checks in words, leaving out the informational ones. */
function summary(checks) {
  if (checks === undefined) return "did not run";
  const count = (status) => checks.filter((check) => check.status === status).length;
  const counts = [
    [count("SUCCESS"), "passed"],
    [count("WARNING"), "warned"],
    [count("FAILURE"), "FAILED"],
  ];
  return counts
    .filter(([number]) => number > 0)
    .map(([number, word]) => `${number} ${word}`)
    .join(", ");
}

/** The checks as text, without values that differ between runs: times, ports, sessions, and the order in which the
 *  server accepted concurrent requests (which is why streams are numbered in the order in which they appear). */
function comparable(checks) {
  if (checks === undefined) return "did not run\n";
  const known = { session: new Map(), stream: new Map() };
  const nth = (kind, key) => {
    if (!known[kind].has(key)) known[kind].set(key, known[kind].size + 1);
    return `<${kind} ${known[kind].get(key)}>`;
  };
  const text = JSON.stringify(checks, withoutTimes, 2)
    .replace(/127\.0\.0\.1:\d+/g, "<server>")
    .replace(/[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}/g, (session) => nth("session", session))
    .replace(/\bmcp-[0-9a-f]{8}-([0-9a-f]{32})\.(\d+)\b/g, (_, stream, index) => `${index}/${stream}`)
    .replace(/\b(\d+)\/(\d+|[0-9a-f]{32})\b/g, (_, index, stream) => `${index}/${nth("stream", stream)}`);
  return `${text}\n`;
}

/** The suite gives an event the `retry` of the latest event in the same read. */
function withoutTimes(key, value) {
  if (key === "timestamp" || key === "date") return undefined;
  if (key === "retryValue" && "eventId" in this) return undefined;
  return value;
}

function differs(scenario, server) {
  const ran = results[server].get(scenario);
  if (server === PROXY && scenario === READ_ON) return !hasReadOn(ran);
  return ran === undefined || comparable(ran) !== comparable(results[REFERENCE].get(scenario));
}

function hasReadOn(checks = []) {
  const isRight = checks.every((check) => ["SUCCESS", "INFO"].includes(check.status));
  return isRight && checks.some((check) => check.id === "stream-closed" && check.details.receivedToolResponse);
}

// --- what is printed

function table() {
  const cell = (scenario, server) =>
    summary(results[server].get(scenario)) +
    (server !== REFERENCE && differs(scenario, server) ? " (differs)" : "");
  const rows = scenarios.map((scenario) => [
    scenario,
    ...[REFERENCE, ...COMPARED].map((server) => cell(scenario, server)),
  ]);
  rows.unshift(["scenario", REFERENCE, ...COMPARED]);
  const widths = rows[0].map((_, column) => Math.max(...rows.map((row) => row[column].length)));
  rows.splice(1, 0, widths.map((width) => "-".repeat(width)));
  for (const row of rows) {
    console.log(`| ${row.map((text, column) => text.padEnd(widths[column])).join(" | ")} |`);
  }
}

function explain(scenario, tier) {
  problems.push(`${scenario} differs between ${REFERENCE} and ${tier}`);
  console.log(`\n=== ${scenario}: ${REFERENCE} and ${tier} differ`);
  const files = [REFERENCE, tier].map((server) => {
    const file = join(work, `${server}.json`);
    writeFileSync(file, comparable(results[server].get(scenario)));
    return file;
  });
  const labels = [`--label=${REFERENCE}`, `--label=${tier}`];
  console.log(spawnSync("diff", ["-U4", ...labels, ...files], { encoding: "utf8" }).stdout);
  console.log(`--- the suite's checks with ${tier}`);
  for (const check of results[tier].get(scenario) ?? []) {
    console.log([check.timestamp, check.status, check.id, check.errorMessage ?? check.description].join("  "));
  }
  console.log(`\n--- the log of ${tier} at that time (UTC)`);
  console.log(log(tier, scenario));
}

/** The server's log from the end of the previous scenario to the end of this one (both clocks write ISO 8601), or its
 *  last lines if it logged nothing. */
function log(server, scenario) {
  const end = (name) => results[server].get(name)?.at(-1)?.timestamp ?? "";
  const text = readFileSync(join(work, server, "log"), "utf8");
  const from = end(scenarios[scenarios.indexOf(scenario) - 1]);
  const lines = text.split("\n").filter((line) => line >= from && line <= `${end(scenario)}~`);
  return (lines.length > 0 ? lines : text.split("\n").slice(-10)).join("\n");
}

/** Checks the calls' outcomes as reported by the layer: it must have seen all calls, and all must have completed. */
function calls() {
  console.log("\nCalls, as the layer saw them:");
  for (const server of TIERS) {
    const report = readFileSync(join(work, server, "stdout"), "utf8").split("\n")[1] || "{}";
    console.log(`  ${server}: ${report}`);
    const { started = 0, ended = {}, open = [], registered } = JSON.parse(report);
    const left = open.filter((call) => !(server === UNSURE.server && UNSURE.calls.includes(call)));
    if (started !== CALLS) problems.push(`${server} saw ${started} calls, not ${CALLS}`);
    if (Object.keys(ended).some((outcome) => outcome !== "Completed")) {
      problems.push(`${server} has calls that did not complete`);
    }
    if (left.length > 0) problems.push(`${server} still waits for ${left.join(", ")}`);
    if (registered !== open.length) problems.push(`${server} counts ${registered} calls in its registry`);
    const log = readFileSync(join(work, server, "log"), "utf8");
    if (log.includes("panicked at")) problems.push(`${server} panicked:\n${log}`);
  }
}

/** The deliberately wrong server must be detected. */
function control() {
  const { server, scenario } = CONTROL;
  console.log(`\n${scenario} with a call timeout: ${summary(results[server].get(scenario))}`);
  if (!results[server].has(scenario) || !differs(scenario, server)) {
    problems.push(`${scenario} does not notice a server that cancels`);
  }
}
