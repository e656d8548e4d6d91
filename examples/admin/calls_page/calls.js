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
    const main = fresh.querySelector("main");
    const before = places();
    document.title = fresh.title;
    document.querySelector("main").replaceWith(main);
    // Where no button came to the place of another, all can be pressed at once.
    main.classList.toggle("still", places().startsWith(before));
    if (focused) {
        document.getElementById(focused)?.focus({ preventScroll: true });
    }
}

// Which button is where, from above.
function places() {
    const buttons = Array.from(document.querySelectorAll("button"));
    return buttons.map((button) => `${button.value} at ${button.getBoundingClientRect().top};`).join("");
}

setTimeout(refresh, 2000);
