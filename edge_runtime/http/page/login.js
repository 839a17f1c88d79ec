"use strict";
document.getElementById("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const message = document.getElementById("message");
  const token = document.getElementById("token").value.trim();
  try {
    const answer = await fetch("/api/session", { method: "POST", headers: { Authorization: "Bearer " + token } });
    if (answer.ok) location.reload();
    else message.textContent = answer.status === 401 ? "That is not its token." : await answer.text();
  } catch {
    message.textContent = "The box does not answer.";
  }
});
