// Writes ../protocols.json: bytes of the stock peers' own marshallers, every field set, no map of two keys.
//
// Run it in a directory of its own, beside a go.mod made of katalyst-core's v0.5.47 (its requirements and `replace` lines,
// under another module name, and itself as a requirement) and its go.sum: `go run . > protocols.json`.
package main

import (
	"encoding/hex"
	"encoding/json"
	"os"

	cpu "github.com/kubewharf/katalyst-core/pkg/agent/qrm-plugins/cpu/dynamicpolicy/cpuadvisor"

	"github.com/kubewharf/katalyst-api/pkg/protocol/evictionplugin/v1alpha1"
	reporter "github.com/kubewharf/katalyst-api/pkg/protocol/reporterplugin/v1alpha1"
	"github.com/kubewharf/katalyst-core/pkg/agent/qrm-plugins/advisorsvc"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	reg "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	pr "k8s.io/kubelet/pkg/apis/podresources/v1"
	rp "k8s.io/kubelet/pkg/apis/resourceplugin/v1alpha1"
)

type m interface{ Marshal() ([]byte, error) }

func main() {
	out := map[string]string{}
	put := func(name string, msg m) {
		b, err := msg.Marshal()
		if err != nil {
			panic(err)
		}
		out[name] = hex.EncodeToString(b)
	}
	meta := &advisorsvc.ContainerMetadata{PodUid: "u1", PodNamespace: "ns", PodName: "web", ContainerName: "main",
		ContainerType: rp.ContainerType_SIDECAR, ContainerIndex: 2, Labels: map[string]string{"a": "b"},
		Annotations: map[string]string{"katalyst.kubewharf.io/qos_level": "shared_cores"}, QosLevel: "shared_cores",
		RequestQuantity: 2, RequestMilliQuantity: 2500, UseMilliQuantity: true}
	put("advisorsvc.ContainerMetadata", meta)
	gates := map[string]*advisorsvc.FeatureGate{"feature_gate_quota_ctrl_knob": {Name: "feature_gate_quota_ctrl_knob", Type: "CPU", MustMutuallySupported: true}}
	extra := []*advisorsvc.CalculationInfo{{CgroupPath: "/kubepods/besteffort", CalculationResult: &advisorsvc.CalculationResult{Values: map[string]string{"memory_limit_in_bytes": "1073741824"}}}}
	put("advisorsvc.GetAdviceRequest", &advisorsvc.GetAdviceRequest{Entries: map[string]*advisorsvc.ContainerMetadataEntries{"u1": {Entries: map[string]*advisorsvc.ContainerMetadata{"main": meta}}}, WantedFeatureGates: gates})
	put("advisorsvc.GetAdviceResponse", &advisorsvc.GetAdviceResponse{PodEntries: map[string]*advisorsvc.CalculationEntries{"u1": {ContainerEntries: map[string]*advisorsvc.CalculationInfo{"main": {CalculationResult: &advisorsvc.CalculationResult{Values: map[string]string{"drop_cache": "true"}}}}}}, ExtraEntries: extra, SupportedFeatureGates: gates})
	put("advisorsvc.ListContainersResponse", &advisorsvc.ListContainersResponse{Containers: []*advisorsvc.ContainerMetadata{meta}})
	block := &cpu.Block{Result: 300, BlockId: "b-1", OverlapTargets: []*cpu.OverlapTarget{{OverlapTargetPoolName: "share", OverlapType: cpu.OverlapType_OverlapWithPool}, {OverlapTargetPodUid: "u2", OverlapTargetContainerName: "db"}}}
	entries := map[string]*cpu.CalculationEntries{"reclaim": {Entries: map[string]*cpu.CalculationInfo{"": {OwnerPoolName: "reclaim", CalculationResultsByNumas: map[int64]*cpu.NumaCalculationResult{-1: {Blocks: []*cpu.Block{block}}}}}}}
	put("cpuadvisor.ListAndWatchResponse", &cpu.ListAndWatchResponse{Entries: entries, AllowSharedCoresOverlapReclaimedCores: true, ExtraEntries: extra})
	put("cpuadvisor.GetAdviceResponse", &cpu.GetAdviceResponse{Entries: entries, AllowSharedCoresOverlapReclaimedCores: true, ExtraEntries: extra, SupportedFeatureGates: gates})
	info := &cpu.AllocationInfo{RampUp: true, OwnerPoolName: "share", TopologyAwareAssignments: map[uint64]string{1: "4-7"}, OriginalTopologyAwareAssignments: map[uint64]string{0: "0-3"}}
	put("cpuadvisor.GetAdviceRequest", &cpu.GetAdviceRequest{Entries: map[string]*cpu.ContainerAllocationInfoEntries{"u1": {Entries: map[string]*cpu.ContainerAllocationInfo{"main": {Metadata: meta, AllocationInfo: info}}}}, WantedFeatureGates: gates})
	put("cpuadvisor.GetCheckpointResponse", &cpu.GetCheckpointResponse{Entries: map[string]*cpu.AllocationEntries{"u1": {Entries: map[string]*cpu.AllocationInfo{"main": info}}}})
	hint := &rp.TopologyHint{Nodes: []uint64{0, 1, 300}, Preferred: true}
	put("resourceplugin.v1alpha1.ResourceRequest", &rp.ResourceRequest{PodUid: "u1", PodNamespace: "ns", PodName: "web", ContainerName: "main", ContainerType: rp.ContainerType_MAIN, ContainerIndex: 1, PodRole: "r", PodType: "t", ResourceName: "cpu", Hint: hint, ResourceRequests: map[string]float64{"resource.katalyst.kubewharf.io/reclaimed_millicpu": 2000}, Labels: map[string]string{"a": "b"}, Annotations: map[string]string{"c": "d"}, NativeQosClass: "Burstable"})
	hints := map[string]*rp.ListOfTopologyHints{"cpu": {Hints: []*rp.TopologyHint{hint, {Nodes: []uint64{1}}}}}
	put("resourceplugin.v1alpha1.ResourceHintsResponse", &rp.ResourceHintsResponse{PodUid: "u1", PodNamespace: "ns", PodName: "web", ContainerName: "main", ContainerType: rp.ContainerType_EPHEMERAL, ContainerIndex: 1, PodRole: "r", PodType: "t", ResourceName: "cpu", ResourceHints: hints, Labels: map[string]string{"a": "b"}, Annotations: map[string]string{"c": "d"}, NativeQosClass: "Burstable"})
	alloc := &rp.ResourceAllocation{ResourceAllocation: map[string]*rp.ResourceAllocationInfo{"cpu": {OciPropertyName: "CpusetCpus", IsNodeResource: false, IsScalarResource: true, AllocatedQuantity: 2.5, AllocationResult: "0-3", Envs: map[string]string{"E": "1"}, Annotations: map[string]string{"x": "y"}, ResourceHints: hints["cpu"], TopologyAssignments: map[uint64]uint64{1: 4}, Mounts: []*rp.Mount{{ContainerPath: "/c", HostPath: "/h", ReadOnly: true}}, Devices: []*rp.DeviceSpec{{ContainerPath: "/dev/c", HostPath: "/dev/h", Permissions: "rw"}}}}}
	put("resourceplugin.v1alpha1.ResourceAllocationResponse", &rp.ResourceAllocationResponse{PodUid: "u1", PodNamespace: "ns", PodName: "web", ContainerName: "main", ContainerType: rp.ContainerType_MAIN, ContainerIndex: 1, PodRole: "r", PodType: "t", ResourceName: "cpu", AllocationResult: alloc, Labels: map[string]string{"a": "b"}, Annotations: map[string]string{"c": "d"}, NativeQosClass: "Burstable"})
	put("resourceplugin.v1alpha1.GetResourcesAllocationResponse", &rp.GetResourcesAllocationResponse{PodResources: map[string]*rp.ContainerResources{"u1": {ContainerResources: map[string]*rp.ResourceAllocation{"main": alloc}}}})
	q := &rp.TopologyAwareQuantity{ResourceValue: 2.5, Node: 1, Name: "eth0", Type: "NIC", TopologyLevel: rp.TopologyLevel_SOCKET, Annotations: map[string]string{"k": "v"}}
	put("resourceplugin.v1alpha1.GetTopologyAwareResourcesResponse", &rp.GetTopologyAwareResourcesResponse{PodUid: "u1", PodName: "web", PodNamespace: "ns", ContainerTopologyAwareResources: &rp.ContainerTopologyAwareResources{ContainerName: "main", AllocatedResources: map[string]*rp.TopologyAwareResource{"cpu": {IsNodeResource: true, IsScalarResource: true, AggregatedQuantity: 2.5, OriginalAggregatedQuantity: 3, TopologyAwareQuantityList: []*rp.TopologyAwareQuantity{q}, OriginalTopologyAwareQuantityList: []*rp.TopologyAwareQuantity{q}}}}})
	put("resourceplugin.v1alpha1.GetTopologyAwareAllocatableResourcesResponse", &rp.GetTopologyAwareAllocatableResourcesResponse{AllocatableResources: map[string]*rp.AllocatableTopologyAwareResource{"cpu": {IsNodeResource: true, IsScalarResource: true, AggregatedAllocatableQuantity: 46, TopologyAwareAllocatableQuantityList: []*rp.TopologyAwareQuantity{q}, AggregatedCapacityQuantity: 48, TopologyAwareCapacityQuantityList: []*rp.TopologyAwareQuantity{q}}}})
	put("resourceplugin.v1alpha1.RegisterRequest", &rp.RegisterRequest{Version: "v1alpha1", Endpoint: "cpu.sock", ResourceName: "cpu", Options: &rp.ResourcePluginOptions{PreStartRequired: true, WithTopologyAlignment: true, NeedReconcile: true, AssociatedDevices: []string{"gpu"}}})
	put("resourceplugin.v1alpha1.AssociatedDeviceRequest", &rp.AssociatedDeviceRequest{ResourceRequest: &rp.ResourceRequest{PodUid: "u1"}, DeviceRequest: []*rp.DeviceRequest{{DeviceName: "gpu", Hint: hint, AvailableDevices: []string{"0"}, ReusableDevices: []string{"1"}, DeviceRequest: 2}}, AccompanyResourceName: "gpu_memory", DeviceName: "gpu"})
	put("pluginregistration.PluginInfo", &reg.PluginInfo{Type: "ResourcePlugin", Name: "cpu", Endpoint: "/e.sock", SupportedVersions: []string{"v1alpha1"}})
	put("pluginregistration.RegistrationStatus", &reg.RegistrationStatus{PluginRegistered: true, Error: "no"})
	topo := &pr.TopologyInfo{Nodes: []*pr.NUMANode{{ID: 1}}}
	pq := &pr.TopologyAwareQuantity{ResourceValue: 2.5, Node: 1, Name: "eth0", Type: "NIC", TopologyLevel: pr.TopologyLevel_SOCKET, Annotations: map[string]string{"k": "v"}}
	put("v1.ListPodResourcesResponse", &pr.ListPodResourcesResponse{PodResources: []*pr.PodResources{{Name: "web", Namespace: "ns", PodRole: "r", PodType: "t", Labels: map[string]string{"a": "b"}, Annotations: map[string]string{"c": "d"}, Containers: []*pr.ContainerResources{{Name: "main", Devices: []*pr.ContainerDevices{{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"g0"}, Topology: topo}}, CpuIds: []int64{2, 3, 300}, Memory: []*pr.ContainerMemory{{MemoryType: "memory", Size_: 1 << 40, Topology: topo}}, Resources: []*pr.TopologyAwareResource{{ResourceName: "cpu", IsNodeResource: true, IsScalarResource: true, AggregatedQuantity: 2.5, OriginalAggregatedQuantity: 3, TopologyAwareQuantityList: []*pr.TopologyAwareQuantity{pq}, OriginalTopologyAwareQuantityList: []*pr.TopologyAwareQuantity{pq}}}}}}}})
	put("v1.AllocatableResourcesResponse", &pr.AllocatableResourcesResponse{CpuIds: []int64{0, 1}, Resources: []*pr.AllocatableTopologyAwareResource{{ResourceName: "cpu", IsNodeResource: true, IsScalarResource: true, AggregatedAllocatableQuantity: 46, TopologyAwareAllocatableQuantityList: []*pr.TopologyAwareQuantity{pq}, AggregatedCapacityQuantity: 48, TopologyAwareCapacityQuantityList: []*pr.TopologyAwareQuantity{pq}}}})
	yes, prio, grace := true, int32(-5), int64(30)
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "ns", UID: "u1", Labels: map[string]string{"a": "b"}, Annotations: map[string]string{"c": "d"}, OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "ds", UID: "o1", Controller: &yes}}},
		Spec:   v1.PodSpec{NodeName: "n1", Priority: &prio, TerminationGracePeriodSeconds: &grace, SchedulerName: "s", Volumes: []v1.Volume{{Name: "v"}}, Containers: []v1.Container{{Name: "main", Image: "i", Env: []v1.EnvVar{{Name: "E", Value: "1"}}, Resources: v1.ResourceRequirements{Requests: v1.ResourceList{"cpu": resource.MustParse("1500m")}, Limits: v1.ResourceList{"memory": resource.MustParse("1Gi")}}}}},
		Status: v1.PodStatus{Phase: v1.PodRunning, QOSClass: v1.PodQOSBurstable, StartTime: &metav1.Time{}, ContainerStatuses: []v1.ContainerStatus{{Name: "main", ContainerID: "containerd://abc", Ready: true}}}}
	put("evictionplugin.v1alpha1.GetEvictPodsRequest", &v1alpha1.GetEvictPodsRequest{ActivePods: []*v1.Pod{pod}})
	put("evictionplugin.v1alpha1.ThresholdMetResponse", &v1alpha1.ThresholdMetResponse{ThresholdValue: 5, ObservedValue: 10, ThresholdOperator: v1alpha1.ThresholdOperator_GREATER_THAN, MetType: v1alpha1.ThresholdMetType_HARD_MET, EvictionScope: "memory", GracePeriodSeconds: -1, Condition: &v1alpha1.Condition{ConditionType: v1alpha1.ConditionType_CNR_CONDITION, Effects: []string{"NoSchedule"}, ConditionName: "CPUPressure", MetCondition: true}})
	put("evictionplugin.v1alpha1.GetTopEvictionPodsRequest", &v1alpha1.GetTopEvictionPodsRequest{TopN: 1, EvictionScope: "memory", CandidateEvictionRecords: []*v1alpha1.EvictionRecord{{Uid: "u1", HasPdb: true, Buckets: &v1alpha1.Buckets{List: []*v1alpha1.Bucket{{Time: 1, Duration: 2, Count: 3}}}, DisruptionsAllowed: 1, CurrentHealthy: 2, DesiredHealthy: 3, ExpectedPods: 4}}})
	put("evictionplugin.v1alpha1.GetEvictPodsResponse", &v1alpha1.GetEvictPodsResponse{EvictPods: []*v1alpha1.EvictPod{{Reason: "why", DeletionOptions: &v1alpha1.DeletionOptions{GracePeriodSeconds: 60}, ForceEvict: true, EvictionPluginName: "p"}}})
	put("reporterplugin.v1alpha1.GetReportContentResponse", &reporter.GetReportContentResponse{Content: []*reporter.ReportContent{{GroupVersionKind: &metav1.GroupVersionKind{Group: "node.katalyst.kubewharf.io", Version: "v1alpha1", Kind: "CustomNodeResource"}, Field: []*reporter.ReportField{{FieldType: reporter.FieldType_Status, FieldName: "TopologyZone", Value: []byte("[]")}}}}})
	enc := json.NewEncoder(os.Stdout)
	enc.SetIndent("", " ")
	if err := enc.Encode(out); err != nil {
		panic(err)
	}
}
