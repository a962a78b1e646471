// Command verdicts says what GitOps tools make of objects, by those tools' own code.
//
//	verdicts check FILE...  every document must be what its kind allows
//	verdicts judge FILE...  objects by name, as JSON on standard input; what is made of each, with the
//	                        rules in the files, as JSON on standard output
//
// kstatus judges by itself; Flux by a Kustomization's healthCheckExprs; Fleet by a fleet.yaml's
// `ignore`; Open Cluster Management by a ManifestWork's feedback rules.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	kubernetesjson "k8s.io/apimachinery/pkg/util/json"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "verdicts:", err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	if len(arguments) == 0 || (arguments[0] != "check" && arguments[0] != "judge") {
		return fmt.Errorf("say `check` or `judge`, then files; got %q", arguments)
	}
	rules, err := readRules(arguments[1:])
	if err != nil || arguments[0] == "check" {
		return err
	}
	objects, err := readObjects(os.Stdin)
	if err != nil {
		return err
	}
	judged := map[string]*verdicts{}
	for name, object := range objects {
		if judged[name], err = rules.judge(object); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return json.NewEncoder(os.Stdout).Encode(judged)
}

// Whole numbers stay whole, as the API server's answers are read.
func readObjects(from io.Reader) (map[string]*unstructured.Unstructured, error) {
	text, err := io.ReadAll(from)
	if err != nil {
		return nil, err
	}
	contents := map[string]any{}
	if err := kubernetesjson.Unmarshal(text, &contents); err != nil {
		return nil, fmt.Errorf("standard input: %w", err)
	}
	objects := map[string]*unstructured.Unstructured{}
	for name, content := range contents {
		object, isObject := content.(map[string]any)
		if !isObject {
			return nil, fmt.Errorf("standard input: %s is no object", name)
		}
		objects[name] = &unstructured.Unstructured{Object: object}
	}
	return objects, nil
}
