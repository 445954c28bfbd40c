// Answers of the page's script to questions on standard input: node calculator.js REPLAY PAGE.
const fs = require("node:fs");
const { answer, command, largest, timelineOn, unpacked } = require(process.argv[2]);
const html = fs.readFileSync(process.argv[3], "utf-8");
const table = (name) => unpacked(html.match(new RegExp(`data-table="${name}">([^<]*)<`))[1]);

(async () => {
  const { cards } = await table("");
  const answers = [];
  for (const { model, index, gpu, length, batch, seek } of JSON.parse(fs.readFileSync(0, "utf-8"))) {
    const card = cards.find((one) => one.name === gpu), training = (await table(model)).trainings[index];
    const timeline = timelineOn(training.timelines, card), told = command(model, training, length, batch, gpu);
    if (!timeline) { answers.push({ command: told }); continue; }
    const usable = card.usable[timeline.network], most = seek ? largest(timeline, length, card, usable) : null;
    answers.push({ ...answer(timeline, length, batch, card), usable, largest: most, command: told });
  }
  console.log(JSON.stringify(answers));
})();
