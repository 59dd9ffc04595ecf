// Streams one answer: go run . MODEL PROMPT
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	enginev1 "example.com/loraplex-client/gen/loraplex/engine/v1"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: stream MODEL PROMPT")
		os.Exit(2)
	}
	if err := stream(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func stream(model, prompt string) error {
	address := os.Getenv("LORAPLEX_ENGINE_ADDRESS")
	if address == "" {
		address = "127.0.0.1:50052"
	}
	connection, err := grpc.NewClient(
		address,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithNoProxy(),
	)
	if err != nil {
		return err
	}
	defer connection.Close()

	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	answer, err := enginev1.NewEngineClient(connection).Generate(ctx, &enginev1.GenerateRequest{
		Model: model,
		Input: &enginev1.GenerateRequest_Chat{Chat: &enginev1.ChatMessages{
			Messages: []*enginev1.ChatMessage{{Role: "user", Content: prompt}},
		}},
		Sampling: &enginev1.SamplingParams{
			Temperature: proto.Float32(0),
			MaxTokens:   proto.Int32(64),
		},
	})
	if err != nil {
		return err
	}
	for {
		response, err := answer.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if delta := response.GetDelta(); delta != nil {
			fmt.Print(delta.GetText())
		}
		if summary := response.GetSummary(); summary != nil {
			tokens := summary.GetUsage().GetCompletionTokens()
			fmt.Printf("\n%d tokens, TTFT %.3f s\n", tokens, summary.GetTtftS())
		}
	}
}
