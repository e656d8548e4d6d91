"use strict";

// Replaces the table every two seconds with the one from a fresh copy of this page, in which the text is already escaped.
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
    // A button that is removed while it is being pressed never receives the click.
    if (document.querySelector("button:active")) {
        return;
    }
    const focused = document.activeElement?.id;
    const main = fresh.querySelector("main");
    const before = places();
    document.title = fresh.title;
    document.querySelector("main").replaceWith(main);
    // If no button has moved, all of them can be pressed right away.
    main.classList.toggle("still", places().startsWith(before));
    if (focused) {
        document.getElementById(focused)?.focus({ preventScroll: true });
    }
}

// The buttons and their vertical positions, from top to bottom.
function places() {
    const buttons = Array.from(document.querySelectorAll("button"));
    return buttons.map((button) => `${button.value} at ${button.getBoundingClientRect().top};`).join("");
}

setTimeout(refresh, 2000);
