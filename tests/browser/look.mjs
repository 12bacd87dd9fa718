// Opens a page in headless Chromium and prints what a user would meet, as one line of JSON.
//   node look.mjs '{"file": ..., "width": 1280, "scheme": "light", "picture": null, "steps": [...]}'
// A step is [what, ...]: ["count", selector], ["text", selector], ["hover", selector, share of its width],
// ["click", selector], ["fill", selector, text], ["eval", expression]; each gives one result.
import { existsSync } from "node:fs";
import { chromium } from "playwright-core";

const asked = JSON.parse(process.argv[2]);
const paths = [process.env.CHROMIUM, "/usr/bin/chromium", "/usr/bin/chromium-browser"];
const executablePath = paths.find((path) => path && existsSync(path));
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"] });
const viewport = { width: asked.width, height: 900 };
const page = await browser.newPage({ viewport, colorScheme: asked.scheme });
page.setDefaultTimeout(120000);
const problems = [], requests = [];
page.on("pageerror", (error) => problems.push(error.message));
page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
page.on("dialog", (dialog) => { problems.push("dialog: " + dialog.message()); dialog.dismiss(); });
page.on("request", (request) => requests.push(request.url()));
await page.goto("file://" + asked.file);

const actions = {
  count: (selector) => page.locator(selector).count(),
  text: (selector) => page.locator(selector).first().innerText(),
  click: (selector) => page.locator(selector).first().click(),
  fill: (selector, text) => page.locator(selector).first().fill(text),
  eval: (expression) => page.evaluate(expression),
  hover: async (selector, share) => {
    const node = page.locator(selector).first();
    await node.scrollIntoViewIfNeeded();
    const box = await node.boundingBox();
    await page.mouse.move(box.x + share * box.width, box.y + box.height / 2);
  },
};
const results = [];
for (const [what, ...given] of asked.steps) results.push((await actions[what](...given)) ?? null);

// What sticks out of its card, or makes the page wider than the window.
const layout = await page.evaluate(() => {
  const outside = [];
  for (const card of document.querySelectorAll(".card")) {
    const frame = card.getBoundingClientRect();
    for (const node of card.querySelectorAll("svg text, h3, .keys span, .note")) {
      const box = node.getBoundingClientRect();
      if (box.width > 0 && (box.left < frame.left - 1 || box.right > frame.right + 1)) {
        outside.push(node.textContent.slice(0, 60));
      }
    }
  }
  return { outside, pageWidth: document.documentElement.scrollWidth };
});
if (asked.picture) await page.screenshot({ path: asked.picture, fullPage: Boolean(asked.whole) });
await browser.close();
console.log(JSON.stringify({ problems, requests, results, ...layout }));
