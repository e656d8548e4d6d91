"use strict";

// Every two seconds the table of a fresh copy of this page, which is escaped already.
async function refresh() {
    if (!document.hidden) {
        try {
            const response = await fetch("calls");
            if (!response.ok) {
                throw new Error(response.statusText);
            }
            const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
            take(fresh);
            document.body.classList.remove("stale");
        } catch {
            document.body.classList.add("stale");
        }
    }
    setTimeout(refresh, 2000);
}

function take(fresh) {
    // A button that goes between press and release gets no click.
    if (document.querySelector("button:active")) {
        return;
    }
    const focused = document.activeElement?.id;
    document.title = fresh.title;
    document.querySelector("main").replaceWith(fresh.querySelector("main"));
    if (focused) {
        document.getElementById(focused)?.focus();
    }
}

setTimeout(refresh, 2000);
