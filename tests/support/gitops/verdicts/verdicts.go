package main

import (
	"context"
	"fmt"

	"github.com/fluxcd/pkg/runtime/cel"
	"github.com/rancher/wrangler/v3/pkg/summary"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/util/jsonpath"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
)

type verdicts struct {
	Kstatus string `json:"kstatus"`
	// One for each Kustomization that has expressions for the object's kind, in the files' order.
	Flux []string `json:"flux"`
	// One for each fleet.yaml: ready, transitioning or error.
	Fleet []string `json:"fleet"`
	// The values that the feedback rules of all ManifestWorks find.
	Feedback map[string]any `json:"feedback"`
}

func (r *rules) judge(object *unstructured.Unstructured) (*verdicts, error) {
	computed, err := status.Compute(object)
	if err != nil {
		return nil, err
	}
	made := &verdicts{Kstatus: computed.Status.String(), Feedback: map[string]any{}}
	if made.Flux, err = r.flux(object); err != nil {
		return nil, err
	}
	made.Fleet = r.fleet(object)
	return made, r.feedback(object, made.Feedback)
}

func (r *rules) flux(object *unstructured.Unstructured) ([]string, error) {
	judged := []string{}
	for _, kustomization := range r.kustomizations {
		for _, check := range kustomization.Spec.HealthCheckExprs {
			if check.APIVersion != object.GetAPIVersion() || check.Kind != object.GetKind() {
				continue
			}
			evaluator, err := cel.NewStatusEvaluator(&check.HealthCheckExpressions)
			if err != nil {
				return nil, err
			}
			result, err := evaluator.Evaluate(context.Background(), object)
			if err != nil {
				return nil, err
			}
			judged = append(judged, result.Status.String())
		}
	}
	return judged, nil
}

func (r *rules) fleet(object *unstructured.Unstructured) []string {
	judged := []string{}
	for _, file := range r.fleets {
		summed := summary.Summarize(without(object, file.Conditions))
		switch {
		case summed.Error:
			judged = append(judged, "error")
		case summed.Transitioning:
			judged = append(judged, "transitioning")
		default:
			judged = append(judged, "ready")
		}
	}
	return judged
}

// A copy of the object less the conditions that have every field of one of those to be ignored.
func without(object *unstructured.Unstructured, ignored []map[string]string) *unstructured.Unstructured {
	copied := object.DeepCopy()
	conditions, _, _ := unstructured.NestedSlice(copied.Object, "status", "conditions")
	kept := []any{}
	for _, condition := range conditions {
		fields, _ := condition.(map[string]any)
		if !hasAnyOf(fields, ignored) {
			kept = append(kept, condition)
		}
	}
	if len(conditions) > 0 {
		_ = unstructured.SetNestedSlice(copied.Object, kept, "status", "conditions")
	}
	return copied
}

func hasAnyOf(fields map[string]any, patterns []map[string]string) bool {
	for _, pattern := range patterns {
		hasAll := true
		for name, value := range pattern {
			hasAll = hasAll && fields[name] == value
		}
		if hasAll {
			return true
		}
	}
	return false
}

// Paths begin at the object's status; a path that leads nowhere brings nothing back.
func (r *rules) feedback(object *unstructured.Unstructured, found map[string]any) error {
	for _, each := range r.works {
		for _, config := range each.Spec.ManifestConfigs {
			for _, rule := range config.FeedbackRules {
				for _, path := range rule.JsonPaths {
					parsed := jsonpath.New(path.Name).AllowMissingKeys(true)
					if err := parsed.Parse("{" + path.Path + "}"); err != nil {
						return fmt.Errorf("feedback rule %s: %w", path.Name, err)
					}
					results, err := parsed.FindResults(object.Object["status"])
					if err != nil {
						return fmt.Errorf("feedback rule %s: %w", path.Name, err)
					}
					for _, result := range results {
						for _, value := range result {
							found[path.Name] = value.Interface()
						}
					}
				}
			}
		}
	}
	return nil
}
