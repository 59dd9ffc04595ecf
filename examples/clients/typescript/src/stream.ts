// Streams one answer: npx tsx src/stream.ts MODEL PROMPT
import { createClient, ConnectError } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { Engine } from "../gen/loraplex/engine/v1/engine_pb.js";

const address = process.env.LORAPLEX_ENGINE_ADDRESS ?? "127.0.0.1:50052";

async function stream(model: string, prompt: string): Promise<void> {
  const engine = createClient(Engine, createGrpcTransport({ baseUrl: `http://${address}` }));
  const answer = engine.generate(
    {
      model,
      input: { case: "chat", value: { messages: [{ role: "user", content: prompt }] } },
      sampling: { temperature: 0, maxTokens: 64 },
    },
    { timeoutMs: 60_000 },
  );
  for await (const { item } of answer) {
    if (item.case === "delta") {
      process.stdout.write(item.value.text);
    } else if (item.case === "summary") {
      const tokens = item.value.usage?.completionTokens ?? 0;
      console.log(`\n${tokens} tokens, TTFT ${item.value.ttftS.toFixed(3)} s`);
    }
  }
}

const [model, prompt] = process.argv.slice(2);
if (model === undefined || prompt === undefined) {
  console.error("usage: stream.ts MODEL PROMPT");
  process.exit(2);
}
stream(model, prompt).catch((error: unknown) => {
  console.error(ConnectError.from(error).message);
  process.exit(1);
});
