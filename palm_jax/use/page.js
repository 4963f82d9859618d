"use strict";
const form = document.getElementById("form");
const said = document.getElementById("said");
const text = document.getElementById("text");

function shown(token) {
  const span = document.createElement("span");
  const probability = Math.exp(token.logprob);
  span.textContent = token.text;
  span.title = `${JSON.stringify(token.text)} (${token.id}): ${(100 * probability).toPrecision(3)}%`;
  // From red, which was unlikely, to green; text keeps its own colour.
  span.style.backgroundColor = `hsl(${120 * probability} 70% 50% / 0.35)`;
  return span;
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const given = { prompt: form.elements.prompt.value };
  for (const name of ["max_tokens", "temperature", "top_k", "top_p", "seed"]) {
    const value = form.elements[name].value;
    if (value !== "") given[name] = Number(value);
  }
  form.querySelector("button").disabled = true;
  said.textContent = "…";
  text.replaceChildren();
  try {
    const response = await fetch("/continue", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(given),
    });
    const answer = await response.json();
    if (response.ok) {
      text.append(given.prompt, ...answer.tokens.map(shown));
      const rate = answer.tokens_per_second.toPrecision(3);
      said.textContent = `${answer.tokens.length} tokens, ${rate} a second; ended by ${answer.ended}`;
    } else {
      said.textContent = answer.error;
    }
  } catch (error) {
    said.textContent = `the server does not answer: ${error.message}`;
  } finally {
    form.querySelector("button").disabled = false;
  }
});
