#!/usr/bin/env node
// Starts the program, whose binary is in the optional package for this platform.
"use strict";

const { spawn } = require("node:child_process");
const { constants } = require("node:os");

const platform = `${process.platform}-${process.arch}`;
const name = `mcp-cancel-proxy-${platform}`;

let binary;
try {
  binary = require.resolve(`${name}/bin/mcp-cancel-proxy`);
} catch {
  const supported = Object.keys(require("../package.json").optionalDependencies);
  console.error(
    supported.includes(name)
      ? `error: the package ${name} is not installed: install mcp-cancel-proxy again, without --omit=optional`
      : `error: mcp-cancel-proxy has no binary for ${platform}; it has packages for ${supported.map((other) => other.slice("mcp-cancel-proxy-".length)).join(", ")}`,
  );
  process.exit(1);
}

const args = process.argv.slice(2);
if (process.execve) {
  // In Node.js 22.15 and later, the binary replaces this process.
  process.execve(binary, [binary, ...args], process.env);
}

// Installed before the program starts, so that no signal can end just this process and leave the program behind.
let child;
for (const signal of ["SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM"]) {
  process.on(signal, () => child.kill(signal));
}
// The program is in this process's group, so Ctrl-C in a terminal reaches both, and the program ignores the forwarded signal
// as a repetition.
child = spawn(binary, args, { stdio: "inherit" });
child.on("error", (error) => {
  console.error(`error: ${binary}: ${error.message}`);
  process.exit(1);
});
child.on("exit", (code, signal) => {
  process.exit(code ?? 128 + constants.signals[signal]);
});
